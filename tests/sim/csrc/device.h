// What torch's runtime asks of a device: guard, events, generators, hooks.
#pragma once
#include <ATen/core/Generator.h>

namespace sim {

// A device generator, whose state is (seed, offset) in 16 bytes: DTensor's random ops read and write that layout.
class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(c10::DeviceIndex index);

  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override;
  uint64_t current_seed() const override;
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  DeviceGenerator* clone_impl() const override;

  uint64_t mixed() const;                 // the seed of the host engine that draws at this offset
  void advance(int64_t elements);

 private:
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

DeviceGenerator& as_device_generator(const at::Generator& generator);
const at::Generator& default_generator(c10::DeviceIndex index);

void register_device();      // allocator, guard and, for PrivateUse1, hooks
void check_hooks();          // raises where torch has cached its own hooks for the HPU key

}  // namespace sim
