#include "fallback.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <atomic>
#include <unordered_set>

#include "../metal/buffer_c.h"
#include "../metal/modes.h"
#include "generator.h"
#include "host_view.h"
#include "memory.h"
#include "messages.h"
#include "stream.h"

namespace vmps {
namespace {

using c10::DispatchKey;
using c10::IValue;
using c10::OperatorHandle;
using Names = std::unordered_set<std::string>;

std::atomic<uint64_t> calls{0};

// Ops whose real MPS kernels take CPU tensors next to MPS ones.
const Names& mixed_device_ops() {
  static const auto* names = new Names{"aten::copy_",
                                       "aten::_copy_from",
                                       "aten::_copy_from_and_resize",
                                       "aten::_foreach_copy_",
                                       "aten::index",
                                       "aten::index_put",
                                       "aten::index_put_",
                                       "aten::_index_put_impl_",
                                       "aten::_unsafe_index",
                                       "aten::_unsafe_index_put",
                                       "aten::set_",
                                       "aten::resize_as_",
                                       "aten::_to_copy",
                                       "aten::to",
                                       "aten::_pack_padded_sequence",
                                       "aten::_pad_packed_sequence"};
  return *names;
}

bool starts_with(const std::string& text, const char* prefix) { return text.rfind(prefix, 0) == 0; }

// What the fallback needs to know of an op, found out once.
struct Traits {
  bool takes_mixed_devices;
  bool takes_host_scalars_of_any_shape;  // step counters, found_inf and the like
  bool draws_from_default_generator = false;
  int generator_argument = -1;
  int host_result = -1;  // the one result that is a CPU tensor by contract
  size_t arguments, results;
  std::vector<bool> writes;  // by argument

  explicit Traits(const OperatorHandle& op) {
    const auto& schema = op.schema();
    const auto& name = schema.name();
    takes_mixed_devices = mixed_device_ops().count(name) != 0;
    takes_host_scalars_of_any_shape =
        starts_with(name, "aten::_foreach") || starts_with(name, "aten::_fused") || starts_with(name, "aten::_amp");
    arguments = schema.arguments().size();
    results = schema.returns().size();
    // PyTorch's own schemas say what an op writes to; those of others may not.
    const bool may_write_to_any = !starts_with(name, "aten::");
    for (size_t i = 0; i < arguments; i++) {
      const c10::Argument& argument = schema.arguments()[i];
      if (argument.name() == "generator") generator_argument = static_cast<int>(i);
      writes.push_back(may_write_to_any || (argument.alias_info() && argument.alias_info()->isWrite()));
    }
    draws_from_default_generator = generator_argument < 0 && op.hasTag(at::Tag::nondeterministic_seeded);
    if (name == "aten::_pack_padded_sequence") host_result = 1;
  }
};

// Lends the CPU's default generator the state of one mps draw, for kernels that take no generator.
class BorrowedCpuGenerator {
 public:
  BorrowedCpuGenerator() : cpu_(at::detail::getDefaultCPUGenerator()), kept_(cpu_.get_state()) {
    cpu_.set_state(generator_for_draw(default_generator()).get_state());
  }
  ~BorrowedCpuGenerator() { cpu_.set_state(kept_); }

 private:
  at::Generator cpu_;
  at::Tensor kept_;
};

template <class Convert>
void convert_tensors(IValue& value, Convert&& convert) {
  if (value.isTensor()) {
    value = convert(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(convert(tensor));
    value = std::move(list);
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<at::Tensor>(convert(*tensor)) : std::nullopt);
    value = std::move(list);
  }
}

// Tells checked mode: all bytes between the tensor's first and last element.
void mark_written(const at::Tensor& tensor) {
  if (!tensor.is_mps() || tensor.layout() != c10::Layout::Strided || tensor.numel() == 0) return;
  int64_t last = tensor.storage_offset();
  for (int64_t d = 0; d < tensor.dim(); d++) last += (tensor.size(d) - 1) * tensor.stride(d);
  const size_t item = tensor.element_size(), begin = tensor.storage_offset() * item;
  buffer_mark_written(tensor.storage().data_ptr().get(), begin, (last + 1) * item - begin);
}

void check_devices(const HostView& view, const Traits& traits) {
  // On a Mac such a tensor can be moved to the device and back, and nothing can be computed with it.
  TORCH_CHECK_TYPE(!view.has_complex128() || !view.host_arguments().empty(), kNoComplex128);
  if (!view.has_device_tensors() || traits.takes_mixed_devices || traits.takes_host_scalars_of_any_shape) return;
  for (auto& tensor : view.host_arguments())
    TORCH_CHECK(tensor.dim() == 0,
                "Expected all tensors to be on the same device, but found at least two devices, mps:0 and cpu!");
}

void run_on_host_memory(const OperatorHandle& op, const Traits& traits, torch::jit::Stack* stack) {
  calls.fetch_add(1, std::memory_order_relaxed);
  before_stock_op();
  HostView view;
  std::optional<c10::Device> target;
  const size_t first = stack->size() - traits.arguments;
  for (size_t i = 0; i < traits.arguments; i++) {
    IValue& value = (*stack)[first + i];
    if (value.isDevice()) {
      target = value.toDevice();
      if (target->is_mps()) value = c10::Device(c10::DeviceType::CPU);
    } else if (value.isGenerator()) {
      if (value.toGenerator().device().is_mps()) value = generator_for_draw(value.toGenerator());
    } else if (value.isStorage()) {
      if (value.toStorage().device_type() == c10::DeviceType::MPS) value = view.to_host(value.toStorage());
    } else {
      convert_tensors(value, [&](const at::Tensor& tensor) {
        if (traits.writes[i]) mark_written(tensor);
        return view.to_host(tensor);
      });
    }
  }
  check_devices(view, traits);
  if (traits.generator_argument >= 0 && (*stack)[first + traits.generator_argument].isNone())
    (*stack)[first + traits.generator_argument] = generator_for_draw(default_generator());
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    std::optional<BorrowedCpuGenerator> borrowed;
    if (traits.draws_from_default_generator) borrowed.emplace();
    op.callBoxed(stack);
  }
  view.write_back();
  if (target && !target->is_mps()) return;
  const size_t first_result = stack->size() - traits.results;
  for (size_t i = 0; i < traits.results; i++)
    if (static_cast<int>(i) != traits.host_result)
      convert_tensors((*stack)[first_result + i], [&](const at::Tensor& tensor) { return view.to_device(tensor); });
}

class StockKernel final : public c10::OperatorKernel {
 public:
  StockKernel(const OperatorHandle& op, bool real) : traits_(op), real_(real) {}

  void operator()(const OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        real_ || !modes().strict, "The operator '", op.operator_name(),
        "' is not currently implemented for the MPS device. If you want this op to be considered for addition please "
        "comment on https://github.com/pytorch/pytorch/issues/141287 and mention use-case, that resulted in missing "
        "op. "
        "As a temporary fix, you can set the environment variable `PYTORCH_ENABLE_MPS_FALLBACK=1` to use the CPU as a "
        "fallback for this op. WARNING: this will be slower than running natively on MPS. (virtual_mps: strict mode; "
        "without it the op runs on the CPU.)");
    run_on_host_memory(op, traits_, stack);
  }

 private:
  const Traits traits_;
  const bool real_;
};

// Ops outside aten that have a CPU kernel and none for MPS.
void fallback_for_other_ops(const OperatorHandle& op, torch::jit::Stack* stack) {
  StockKernel(op, /*real=*/false)(op, {}, stack);
}

// A composite op reaches MPS kernels by itself. These ask the device which backend to use, which this build of PyTorch
// cannot answer; and linear, composite elsewhere, is a kernel with a backward of its own on a Mac.
const Names& composites_to_run_whole() {
  static const auto* names = new Names{"copy_", "convolution", "_convolution", "convolution_backward", "linear"};
  return *names;
}

// Where the device's tensors are dispatched, and whose kernels serve them.
struct Backend {
  DispatchKey device, host;
  Names real;
  const Names& whole;
};

bool wants_kernel(const OperatorHandle& op, const std::string& name, const Backend& backend) {
  if (op.hasKernelForDispatchKey(backend.device)) return false;
  return op.hasKernelForDispatchKey(backend.host) || backend.whole.count(name);
}

void register_for(const Backend& backend) {
  auto* library = new torch::Library(torch::Library::IMPL, "aten", backend.device, __FILE__, __LINE__);
  constexpr size_t kNamespace = sizeof("aten::") - 1;
  for (auto& full : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!starts_with(full.name, "aten::")) continue;
    auto op = c10::Dispatcher::singleton().findSchema(full);
    if (!op) continue;
    std::string name = full.name.substr(kNamespace);
    if (!full.overload_name.empty()) name += "." + full.overload_name;
    const bool is_real = backend.real.count(name) || backend.whole.count(name);
    if (wants_kernel(*op, name, backend))
      library->impl(name.c_str(),
                    torch::CppFunction::makeFromBoxedFunctor(std::make_unique<StockKernel>(*op, is_real)));
  }
}

}  // namespace

void register_stock_ops(const std::vector<std::string>& dense, const std::vector<std::string>& sparse) {
  static const Names no_names;
  register_for({DispatchKey::MPS, DispatchKey::CPU, Names(dense.begin(), dense.end()), composites_to_run_whole()});
  register_for({DispatchKey::SparseMPS, DispatchKey::SparseCPU, Names(sparse.begin(), sparse.end()), no_names});
}

uint64_t stock_op_calls() { return calls; }

}  // namespace vmps

TORCH_LIBRARY_IMPL(_, MPS, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&vmps::fallback_for_other_ops>());
}
