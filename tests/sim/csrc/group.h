// The device's collective library: gloo on host copies, finished only when somebody waits.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <chrono>
#include <string>

namespace sim {

c10::intrusive_ptr<c10d::Backend> make_backend(
    c10::intrusive_ptr<c10d::Backend> inner, const std::string& name, std::chrono::milliseconds timeout);

void finish_collectives();    // waits for all that are under way, as a sync of the device does
void register_c10d_kernels();  // stock torch has none for the HPU key: there, the vendor's bridge brings them

}  // namespace sim
