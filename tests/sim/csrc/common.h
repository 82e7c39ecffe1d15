// What most files include, compiled once (tests/sim/build.py): parsing torch's headers is nearly all of a build.
#pragma once
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/library.h>
