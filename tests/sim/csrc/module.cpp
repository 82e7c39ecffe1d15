// The Python module: install the device once, and the switches that tests turn.
#include <ATen/core/Generator.h>
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "device.h"
#include "group.h"
#include "kernels.h"
#include "runtime.h"

namespace {

namespace py = pybind11;

void install(bool hpu_key) {
  if (hpu_key)
    sim::target() = {c10::DeviceType::HPU, c10::DispatchKey::HPU, c10::DispatchKey::AutocastHPU};
  sim::register_device();
  sim::register_tensor_kernels();
  sim::register_math_kernels();
  sim::register_fallback();
  sim::register_autocast();
  sim::on_device_sync(&sim::finish_collectives);
  if (hpu_key)
    sim::register_c10d_kernels();
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::module_::import("torch._C._distributed_c10d");  // whose types cross this border
  m.def("install", &install);
  m.def("default_generator", [](int index) { return sim::default_generator(c10::DeviceIndex(index)); });
  m.def("make_backend", &sim::make_backend);

  m.def("device_count", [] { return sim::settings().count.load(); });
  m.def("set_device_count", [](int n) { sim::settings().count = n; });
  m.def("set_capacity", [](size_t bytes) { sim::settings().capacity = bytes; });
  m.def("pending", [](int index) { return sim::pending(c10::DeviceIndex(index)); });

  m.def("set_fault", &sim::set_fault);
  m.def("set_hang", &sim::set_hang);
  m.def("set_denied", &sim::set_denied);
  m.def("clear_faults", &sim::clear_faults);
  m.def("calls", &sim::calls);
}
