// Registrations with torch's dispatcher under a key that is known at run time only.
#pragma once
#include <torch/library.h>

#include <memory>
#include <vector>

namespace sim {

// A library that stays registered for the life of the process.
inline torch::Library& library(const char* space, c10::DispatchKey key) {
  static auto* kept = new std::vector<std::unique_ptr<torch::Library>>();
  kept->push_back(std::make_unique<torch::Library>(torch::Library::IMPL, space, key, __FILE__, __LINE__));
  return *kept->back();
}

}  // namespace sim
