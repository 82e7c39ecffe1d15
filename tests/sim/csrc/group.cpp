#include "group.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/distributed/c10d/exception.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

#include "alias.h"
#include "runtime.h"

namespace sim {

namespace {

using namespace c10d;
using Milliseconds = std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;

class DeviceWork;
void forget(const DeviceWork* work);

// A collective under way. The result reaches device memory when somebody waits for it; until then the outputs read
// NaN, so that a missing wait is wrong every time.
class DeviceWork final : public Work {
 public:
  DeviceWork(WorkPtr inner, Tensors outputs, Tensors staged, int rank, std::string op, Milliseconds timeout)
      : Work(rank, OpType::UNKNOWN),
        inner_(std::move(inner)),
        outputs_(std::move(outputs)),
        staged_(std::move(staged)),
        op_(std::move(op)),
        timeout_(timeout) {}

  bool isCompleted() override {
    if (!inner_ || !inner_->isCompleted())
      return false;
    if (inner_->isSuccess())
      deliver();  // who has seen that it is complete may read the result
    return true;
  }
  bool isSuccess() const override {
    return inner_ && inner_->isSuccess();
  }
  std::exception_ptr exception() const override {
    return inner_ ? inner_->exception() : nullptr;
  }
  int sourceRank() const override {
    return inner_ ? inner_->sourceRank() : -1;
  }
  void synchronize() override {
    wait(kNoTimeout);
  }
  Tensors result() override {
    return outputs_;
  }

  bool wait(Milliseconds timeout) override {
    forget(this);
    if (!inner_)
      hang(timeout == kNoTimeout ? timeout_ : timeout);
    if (timeout == kNoTimeout)
      inner_->wait();
    else
      inner_->wait(timeout);
    deliver();
    return true;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::lock_guard lock(future_mutex_);
    if (future_)
      return future_;
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices());
    if (inner_) {
      auto self = c10::intrusive_ptr<DeviceWork>::reclaim_copy(this);
      inner_->getFuture()->addCallback([self](c10::ivalue::Future& done) { self->complete_future(done); });
    }
    return future_;
  }

 private:
  [[noreturn]] void hang(Milliseconds limit) const {
    std::this_thread::sleep_for(limit);
    C10_THROW_ERROR(
        DistBackendError, c10::str("sim: collective ", op_, " timed out after ", limit.count(), " ms (injected hang)"));
  }

  void deliver() {
    forget(this);
    std::lock_guard lock(mutex_);
    if (delivered_)
      return;
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    const Tensors hosts = host_aliases(outputs_);
    for (size_t i = 0; i < hosts.size(); i++)
      hosts[i].copy_(staged_[i]);
    delivered_ = true;
  }

  void complete_future(const c10::ivalue::Future& done) {
    if (done.hasError())
      return future_->setError(done.exception_ptr());
    try {
      deliver();
      future_->markCompleted(c10::IValue(outputs_));
    } catch (...) {
      future_->setError(std::current_exception());
    }
  }

  std::vector<c10::Device> devices() const {
    std::vector<c10::Device> found;
    for (auto& tensor : outputs_)
      if (std::find(found.begin(), found.end(), tensor.device()) == found.end())
        found.push_back(tensor.device());
    return found;
  }

  WorkPtr inner_;  // none: the collective hangs
  Tensors outputs_, staged_;
  std::string op_;
  Milliseconds timeout_;
  std::mutex mutex_, future_mutex_;
  bool delivered_ = false;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// ---- all collectives under way in this process
//
// Kept until somebody waits: a sync of the device completes also those whose handles were dropped.

std::mutex live_mutex;
auto& live = *new std::vector<c10::intrusive_ptr<DeviceWork>>();  // never destroyed: it holds tensors

void remember(const c10::intrusive_ptr<DeviceWork>& work) {
  std::lock_guard lock(live_mutex);
  live.push_back(work);
}

void forget(const DeviceWork* work) {
  c10::intrusive_ptr<DeviceWork> last;  // freed after the lock: freeing tensors can take Python's
  std::lock_guard lock(live_mutex);
  const auto found = std::find_if(live.begin(), live.end(), [&](auto& w) { return w.get() == work; });
  if (found == live.end())
    return;
  last = std::move(*found);
  live.erase(found);
}

// ---- staging

Tensors stage_inputs(const Tensors& hosts) {
  Tensors staged;
  for (auto& host : hosts)
    staged.push_back(host.clone(at::MemoryFormat::Contiguous));
  return staged;
}

Tensors stage_outputs(const Tensors& hosts) {
  Tensors staged;
  for (auto& host : hosts)
    staged.push_back(at::empty_like(host, host.options(), at::MemoryFormat::Contiguous));
  return staged;
}

// As fresh memory: NaN, or -1 where there is none.
void poison(const Tensors& hosts) {
  for (auto& host : hosts)
    if (host.is_floating_point() || host.is_complex())
      host.fill_(std::numeric_limits<double>::quiet_NaN());
    else
      host.fill_(-1);
}

void flush_streams_of(const Tensors& tensors) {
  for (auto& tensor : tensors)
    if (!tensor.is_cpu())
      flush_current(tensor.device().index());
}

Tensors joined(const std::vector<Tensors>& lists) {
  Tensors all;
  for (auto& list : lists)
    all.insert(all.end(), list.begin(), list.end());
  return all;
}

// The opposite of joined: `all` cut into lists as long as those of `like`.
std::vector<Tensors> cut(const Tensors& all, const std::vector<Tensors>& like) {
  std::vector<Tensors> lists;
  auto at = all.begin();
  for (auto& list : like) {
    lists.emplace_back(at, at + std::ptrdiff_t(list.size()));
    at += std::ptrdiff_t(list.size());
  }
  return lists;
}

class DeviceBackend final : public Backend {
 public:
  DeviceBackend(c10::intrusive_ptr<Backend> inner, std::string name, Milliseconds timeout)
      : Backend(inner->getRank(), inner->getSize()),
        inner_(std::move(inner)),
        name_(std::move(name)),
        timeout_(timeout),
        options_(c10::make_intrusive<Backend::Options>(name_, timeout)) {}

  const std::string getBackendName() const override {
    return name_;
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return options_;
  }
  void setTimeout(Milliseconds timeout) override {
    timeout_ = timeout;
    inner_->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return sequence_;
  }

  // ---- collectives that change their tensors

  WorkPtr allreduce(Tensors& tensors, const AllreduceOptions& options) override {
    return in_place("allreduce", tensors, [&](Tensors& t) { return inner_->allreduce(t, options); });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const AllreduceCoalescedOptions& options) override {
    return in_place(
        "allreduce_coalesced", tensors, [&](Tensors& t) { return inner_->allreduce_coalesced(t, options); });
  }
  WorkPtr broadcast(Tensors& tensors, const BroadcastOptions& options) override {
    return in_place("broadcast", tensors, [&](Tensors& t) { return inner_->broadcast(t, options); });
  }
  WorkPtr reduce(Tensors& tensors, const ReduceOptions& options) override {
    return in_place("reduce", tensors, [&](Tensors& t) { return inner_->reduce(t, options); });
  }

  // ---- collectives from inputs to outputs

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const AllgatherOptions& options) override {
    return issue("allgather", joined(outputs), inputs, [&](Tensors& out, Tensors& in) {
      auto lists = cut(out, outputs);
      return inner_->allgather(lists, in, options);
    });
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const AllgatherOptions& options) override {
    return issue("_allgather_base", {output}, {input}, [&](Tensors& out, Tensors& in) {
      return inner_->_allgather_base(out[0], in[0], options);
    });
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const AllgatherOptions& options) override {
    return issue("allgather_into_tensor_coalesced", outputs, inputs, [&](Tensors& out, Tensors& in) {
      return inner_->allgather_into_tensor_coalesced(out, in, options);
    });
  }
  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const ReduceScatterOptions& options) override {
    return issue("reduce_scatter", outputs, joined(inputs), [&](Tensors& out, Tensors& in) {
      auto lists = cut(in, inputs);
      return inner_->reduce_scatter(out, lists, options);
    });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const ReduceScatterOptions& options) override {
    return issue("_reduce_scatter_base", {output}, {input}, [&](Tensors& out, Tensors& in) {
      return inner_->_reduce_scatter_base(out[0], in[0], options);
    });
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const ReduceScatterOptions& options) override {
    return issue("reduce_scatter_tensor_coalesced", outputs, inputs, [&](Tensors& out, Tensors& in) {
      return inner_->reduce_scatter_tensor_coalesced(out, in, options);
    });
  }
  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs, const GatherOptions& options) override {
    return issue("gather", joined(outputs), inputs, [&](Tensors& out, Tensors& in) {
      auto lists = cut(out, outputs);
      return inner_->gather(lists, in, options);
    });
  }
  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs, const ScatterOptions& options) override {
    return issue("scatter", outputs, joined(inputs), [&](Tensors& out, Tensors& in) {
      auto lists = cut(in, inputs);
      return inner_->scatter(out, lists, options);
    });
  }
  WorkPtr alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
      const AllToAllOptions& options) override {
    return issue("alltoall_base", {output}, {input}, [&](Tensors& out, Tensors& in) {
      return inner_->alltoall_base(out[0], in[0], output_splits, input_splits, options);
    });
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const AllToAllOptions& options) override {
    return issue(
        "alltoall", outputs, inputs, [&](Tensors& out, Tensors& in) { return inner_->alltoall(out, in, options); });
  }
  WorkPtr send(Tensors& tensors, int peer, int tag) override {
    return issue("send", {}, tensors, [&](Tensors&, Tensors& in) { return inner_->send(in, peer, tag); });
  }
  WorkPtr recv(Tensors& tensors, int peer, int tag) override {
    return issue("recv", tensors, {}, [&](Tensors& out, Tensors&) { return inner_->recv(out, peer, tag); });
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return issue("recvAnysource", tensors, {}, [&](Tensors& out, Tensors&) { return inner_->recvAnysource(out, tag); });
  }
  WorkPtr barrier(const BarrierOptions& options) override {
    return issue("barrier", {}, {}, [&](Tensors&, Tensors&) { return inner_->barrier(options); });
  }

 private:
  // `call` gets host copies in place of the device tensors, and runs before this returns; its work goes on.
  template <class Call>
  WorkPtr issue(const char* op, const Tensors& outputs, const Tensors& inputs, Call call, bool reads_outputs = false) {
    const auto name = std::string("c10d::") + op;
    sequence_++;
    check_fault(name);
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    flush_streams_of(outputs);
    flush_streams_of(inputs);
    const Tensors hosts = host_aliases(outputs);
    Tensors in = stage_inputs(host_aliases(inputs));
    Tensors out = reads_outputs ? stage_inputs(hosts) : stage_outputs(hosts);
    const WorkPtr inner = hangs(name) ? WorkPtr() : call(out, in);
    poison(hosts);
    auto work = c10::make_intrusive<DeviceWork>(inner, outputs, out, getRank(), op, timeout_);
    remember(work);
    return work;
  }

  template <class Call>
  WorkPtr in_place(const char* op, const Tensors& tensors, Call call) {
    return issue(op, tensors, {}, [&](Tensors& out, Tensors&) { return call(out); }, /*reads_outputs=*/true);
  }

  c10::intrusive_ptr<Backend> inner_;
  std::string name_;
  Milliseconds timeout_;
  c10::intrusive_ptr<Options> options_;
  uint64_t sequence_ = 0;
};

}  // namespace

c10::intrusive_ptr<Backend> make_backend(
    c10::intrusive_ptr<Backend> inner, const std::string& name, Milliseconds timeout) {
  return c10::make_intrusive<DeviceBackend>(std::move(inner), name, timeout);
}

void finish_collectives() {
  std::vector<c10::intrusive_ptr<DeviceWork>> works;
  {
    std::lock_guard lock(live_mutex);
    works.swap(live);
  }
  for (auto& work : works)
    work->wait(kNoTimeout);
}

}  // namespace sim
