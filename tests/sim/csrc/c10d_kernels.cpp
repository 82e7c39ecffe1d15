// torch.distributed's ops on the HPU key: each goes to the backend that the group has for the device.
// Signatures must be exactly those that torch registers elsewhere (torch/csrc/distributed/c10d/Ops.cpp).
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "group.h"
#include "library.h"
#include "runtime.h"

namespace sim {

namespace {

using namespace c10d;
using at::Tensor;
using at::TensorList;
using Group = c10::intrusive_ptr<ProcessGroup>;
using Op = c10::intrusive_ptr<ReduceOp>;
using WorkPtr = c10::intrusive_ptr<Work>;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using Ints = std::vector<int64_t>;

c10::intrusive_ptr<Backend> of(const Group& group) {
  return group->getBackend(target().type);
}

std::chrono::milliseconds ms(int64_t count) {
  return std::chrono::milliseconds(count);
}

std::tuple<Tensors, WorkPtr> allreduce(
    TensorList tensors, const Group& group, const Op& op, const std::optional<Tensor>&, bool, int64_t timeout) {
  auto list = tensors.vec();
  auto work = of(group)->allreduce(list, AllreduceOptions{*op, ms(timeout)});
  return {list, work};
}

WorkPtr allreduce_coalesced(TensorList tensors, const Group& group, const Op& op, bool, int64_t timeout) {
  auto list = tensors.vec();
  AllreduceCoalescedOptions options;
  options.reduceOp = *op;
  options.timeout = ms(timeout);
  return of(group)->allreduce_coalesced(list, options);
}

std::tuple<Tensors, WorkPtr> broadcast(
    TensorList tensors, const Group& group, int64_t root, int64_t root_tensor, bool, int64_t timeout) {
  auto list = tensors.vec();
  auto work = of(group)->broadcast(list, BroadcastOptions{root, root_tensor, ms(timeout)});
  return {list, work};
}

WorkPtr reduce(
    TensorList tensors, const Group& group, const Op& op, int64_t root, int64_t root_tensor, bool, int64_t timeout) {
  auto list = tensors.vec();
  return of(group)->reduce(list, ReduceOptions{*op, root, root_tensor, ms(timeout)});
}

std::tuple<Lists, WorkPtr> allgather(
    const Lists& outputs, TensorList inputs, const Group& group, bool, int64_t timeout) {
  auto lists = outputs;
  auto list = inputs.vec();
  auto work = of(group)->allgather(lists, list, AllgatherOptions{ms(timeout)});
  return {lists, work};
}

std::tuple<Tensor, WorkPtr> allgather_base(
    Tensor& output, Tensor& input, const Group& group, bool, int64_t timeout) {
  auto work = of(group)->_allgather_base(output, input, AllgatherOptions{ms(timeout)});
  return {output, work};
}

WorkPtr allgather_into_tensor_coalesced(TensorList outputs, TensorList inputs, const Group& group, bool) {
  auto out = outputs.vec(), in = inputs.vec();
  return of(group)->allgather_into_tensor_coalesced(out, in, AllgatherOptions{});
}

std::tuple<Tensors, WorkPtr> reduce_scatter(
    const TensorList& outputs, const Lists& inputs, const Group& group, const Op& op, bool, int64_t timeout) {
  auto out = outputs.vec();
  auto in = inputs;
  auto work = of(group)->reduce_scatter(out, in, ReduceScatterOptions{*op, ms(timeout)});
  return {out, work};
}

std::tuple<Tensor, WorkPtr> reduce_scatter_base(
    Tensor& output, Tensor& input, const Group& group, const Op& op, bool, int64_t timeout) {
  auto work = of(group)->_reduce_scatter_base(output, input, ReduceScatterOptions{*op, ms(timeout)});
  return {output, work};
}

WorkPtr reduce_scatter_tensor_coalesced(
    TensorList outputs, TensorList inputs, const Group& group, const Op& op, bool, int64_t timeout) {
  auto out = outputs.vec(), in = inputs.vec();
  return of(group)->reduce_scatter_tensor_coalesced(out, in, ReduceScatterOptions{*op, ms(timeout)});
}

WorkPtr alltoall_base(
    Tensor& output, Tensor& input, const Group& group, Ints output_splits, Ints input_splits, bool, int64_t timeout) {
  return of(group)->alltoall_base(output, input, output_splits, input_splits, AllToAllOptions{ms(timeout)});
}

std::tuple<Tensors, WorkPtr> alltoall(
    const TensorList& outputs, const TensorList& inputs, const Group& group, bool, int64_t timeout) {
  auto out = outputs.vec(), in = inputs.vec();
  auto work = of(group)->alltoall(out, in, AllToAllOptions{ms(timeout)});
  return {out, work};
}

WorkPtr gather(
    const Lists& outputs, const TensorList& inputs, const Group& group, int64_t root, bool, int64_t timeout) {
  auto out = outputs;
  auto in = inputs.vec();
  return of(group)->gather(out, in, GatherOptions{root, ms(timeout)});
}

std::tuple<Tensors, WorkPtr> scatter(
    const TensorList& outputs, const Lists& inputs, const Group& group, int64_t root, bool, int64_t timeout) {
  auto out = outputs.vec();
  auto in = inputs;
  auto work = of(group)->scatter(out, in, ScatterOptions{root, ms(timeout)});
  return {out, work};
}

WorkPtr barrier(Tensor, const Group& group, const Ints&, bool, int64_t timeout) {
  BarrierOptions options;
  options.timeout = ms(timeout);
  return of(group)->barrier(options);
}

WorkPtr send(TensorList tensors, const Group& group, int64_t peer, int64_t tag) {
  auto list = tensors.vec();
  return of(group)->send(list, int(peer), int(tag));
}

WorkPtr recv(TensorList tensors, const Group& group, int64_t peer, int64_t tag) {
  auto list = tensors.vec();
  return of(group)->recv(list, int(peer), int(tag));
}

WorkPtr recv_any_source(TensorList tensors, const Group& group, int64_t tag) {
  auto list = tensors.vec();
  return of(group)->recvAnysource(list, int(tag));
}

}  // namespace

void register_c10d_kernels() {
  auto& c10d = library("c10d", target().key);
  c10d.impl("allreduce_", &allreduce);
  c10d.impl("allreduce_coalesced_", &allreduce_coalesced);
  c10d.impl("broadcast_", &broadcast);
  c10d.impl("reduce_", &reduce);
  c10d.impl("allgather_", &allgather);
  c10d.impl("_allgather_base_", &allgather_base);
  c10d.impl("allgather_into_tensor_coalesced_", &allgather_into_tensor_coalesced);
  c10d.impl("reduce_scatter_", &reduce_scatter);
  c10d.impl("_reduce_scatter_base_", &reduce_scatter_base);
  c10d.impl("reduce_scatter_tensor_coalesced_", &reduce_scatter_tensor_coalesced);
  c10d.impl("alltoall_base_", &alltoall_base);
  c10d.impl("alltoall_", &alltoall);
  c10d.impl("gather_", &gather);
  c10d.impl("scatter_", &scatter);
  c10d.impl("barrier", &barrier);
  c10d.impl("send", &send);
  c10d.impl("recv_", &recv);
  c10d.impl("recv_any_source_", &recv_any_source);
}

}  // namespace sim
