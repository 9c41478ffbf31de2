// The Python half: what torch._C has on a Mac and lacks here, and this package's own switches.
#include <ATen/core/Tensor.h>
#include <ATen/mps/MPSDevice.h>
#include <ATen/native/mps/MetalShaderLibrary.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "../executor/executor.h"
#include "../metal/modes.h"
#include "fallback.h"
#include "memory.h"
#include "version.h"

namespace py = pybind11;

namespace vmps {
namespace {

using at::native::mps::DynamicMetalShaderLibrary;
using at::native::mps::MetalKernelFunction;
using at::native::mps::MetalShaderLibrary;
using Sizes = std::vector<uint64_t>;

std::optional<Sizes> sizes_from(const py::object& object) {
  if (object.is_none()) return std::nullopt;
  Sizes sizes;
  if (py::isinstance<py::int_>(object))
    sizes.push_back(object.cast<uint64_t>());
  else
    sizes = object.cast<Sizes>();
  TORCH_CHECK(!sizes.empty() && sizes.size() < 4, "Number of threads and group_size must have 1 to 3 elements, got ",
              sizes.size());
  return sizes;
}

// arg_casts is None, one type name for every argument, or a dict from argument position to type name.
std::string cast_for(const py::object& arg_casts, size_t index) {
  if (arg_casts.is_none()) return "";
  if (py::isinstance<py::str>(arg_casts)) return arg_casts.cast<std::string>();
  TORCH_CHECK(py::isinstance<py::dict>(arg_casts), "Unexpected caster arg type: expected None, str or dict");
  const auto casts = arg_casts.cast<py::dict>();
  const py::int_ key(index);
  return casts.contains(key) ? casts[key].cast<std::string>() : "";
}

template <class Target, class Source>
void set_as(MetalKernelFunction& kernel, unsigned index, const std::vector<Source>& values) {
  std::vector<Target> converted;
  for (auto value : values) {
    if constexpr (std::is_floating_point_v<Source>)
      converted.push_back(Target(static_cast<float>(value)));
    else
      converted.push_back(static_cast<Target>(value));
  }
  kernel.setArg(index, converted.data(), converted.size() * sizeof(Target));
}

void set_floats(MetalKernelFunction& kernel,
                unsigned index,
                const std::vector<double>& values,
                const std::string& cast) {
  if (cast.empty() || cast == "fp32") return set_as<float>(kernel, index, values);
  if (cast == "fp16") return set_as<c10::Half>(kernel, index, values);
  if (cast == "bf16") return set_as<c10::BFloat16>(kernel, index, values);
  TORCH_CHECK(false, "Unsupported cast instruction ", cast);
}

void set_integers(MetalKernelFunction& kernel,
                  unsigned index,
                  const std::vector<int64_t>& values,
                  const std::string& cast) {
  if (cast.empty() || cast == "int64" || cast == "uint64") return set_as<int64_t>(kernel, index, values);
  if (cast == "int32" || cast == "uint32") return set_as<int32_t>(kernel, index, values);
  if (cast == "int16" || cast == "uint16") return set_as<int16_t>(kernel, index, values);
  if (cast == "int8" || cast == "uint8") return set_as<int8_t>(kernel, index, values);
  set_floats(kernel, index, std::vector<double>(values.begin(), values.end()), cast);
}

void set_scalars(MetalKernelFunction& kernel, unsigned index, const py::handle& argument, const std::string& cast) {
  std::vector<py::handle> items{argument};
  if (py::isinstance<py::tuple>(argument) || py::isinstance<py::list>(argument)) {
    items.clear();
    for (auto item : argument) items.push_back(item);
  }
  TORCH_CHECK(!items.empty(), "Empty list/tuple is not supported as a kernel argument, at position ", index);
  bool any_float = false, all_bool = true;
  for (auto item : items) {
    any_float |= py::isinstance<py::float_>(item);
    all_bool &= py::isinstance<py::bool_>(item);
    TORCH_CHECK(py::isinstance<py::float_>(item) || PyIndex_Check(item.ptr()),
                "Unsupported kernel argument type at position ", index, ": ",
                py::str(py::type::of(item)).cast<std::string>());
  }
  if (any_float) {
    std::vector<double> values;
    for (auto item : items) values.push_back(item.cast<double>());
    return set_floats(kernel, index, values, cast);
  }
  std::vector<int64_t> values;
  for (auto item : items) {
    const auto integer = py::reinterpret_steal<py::int_>(PyNumber_Index(item.ptr()));
    // Python's integers above the signed range are meant for a ulong parameter: the bits are what counts.
    values.push_back(static_cast<int64_t>(PyLong_AsUnsignedLongLongMask(integer.ptr())));
  }
  if (all_bool && cast.empty()) return set_as<uint8_t>(kernel, index, values);
  set_integers(kernel, index, values, cast);
}

void call_kernel(MetalKernelFunction& kernel,
                 const py::args& arguments,
                 const py::object& threads_object,
                 const py::object& group_object,
                 const py::object& arg_casts) {
  auto threads = sizes_from(threads_object);
  const auto group = sizes_from(group_object);
  TORCH_CHECK(arguments.size() > 0, "At least one argument is expected");
  kernel.runCommandBlock([&] {
    kernel.startEncoding();
    for (size_t i = 0; i < arguments.size(); i++) {
      const py::handle argument = arguments[i];
      if (argument.is_none()) continue;
      if (!THPVariable_Check(argument.ptr())) {
        set_scalars(kernel, i, argument, cast_for(arg_casts, i));
        continue;
      }
      const at::Tensor& tensor = THPVariable_Unpack(argument.ptr());
      kernel.setArg(i, tensor);
      if (!threads) threads = Sizes{static_cast<uint64_t>(tensor.numel())};
    }
    TORCH_CHECK(threads && threads->size() < 4, "Number of threads is undefined or has wrong dimension");
    TORCH_CHECK(!group || threads->size() == group->size(), "threads and group_size must have the same dimension");
    if (threads->size() == 1 && !group)
      kernel.dispatch((*threads)[0]);
    else
      kernel.dispatch(*threads, group ? c10::OptionalArrayRef<uint64_t>(*group) : std::nullopt);
  });
}

void define_shader_library(py::module_& m) {
  py::class_<MetalKernelFunction, std::shared_ptr<MetalKernelFunction>>(m, "_mps_MetalKernel")
      .def("__call__", &call_kernel, py::kw_only(), py::arg("threads") = py::none(), py::arg("group_size") = py::none(),
           py::arg("arg_casts") = py::none())
      .def_property_readonly("max_threads_per_threadgroup", &MetalKernelFunction::getMaxThreadsPerThreadgroup)
      .def_property_readonly("thread_execution_width", &MetalKernelFunction::getThreadExecutionWidth)
      .def_property_readonly("static_thread_group_memory_length",
                             &MetalKernelFunction::getStaticThreadGroupMemoryLength);
  py::class_<MetalShaderLibrary, std::shared_ptr<MetalShaderLibrary>>(m, "_mps_ShaderLibrary")
      .def("__getattr__",
           [](MetalShaderLibrary& library, const std::string& name) {
             if (name.rfind("__", 0) == 0) throw py::attribute_error(name);  // Python asks for these by itself
             return library.getKernelFunction(name);
           })
      .def("__dir__", [](MetalShaderLibrary& library) { return library.getFunctionNames(); });
  m.def("_mps_compileShader", [](const std::string& source) -> std::shared_ptr<MetalShaderLibrary> {
    return std::make_shared<DynamicMetalShaderLibrary>(source);
  });
#if VMPS_TORCH_VERSION >= 213
  using at::native::mps::PrecompiledMetalShaderLibrary;
  m.def("_mps_loadMetalllib", [](const std::string& bytes) -> std::shared_ptr<MetalShaderLibrary> {
    return std::make_shared<PrecompiledMetalShaderLibrary>(std::vector<uint8_t>(bytes.begin(), bytes.end()));
  });
  m.def("_mps_loadMetallibFromPath", [](const std::string& path) -> std::shared_ptr<MetalShaderLibrary> {
    return std::make_shared<PrecompiledMetalShaderLibrary>(path);
  });
#endif
}

std::atomic<bool>& mode(const std::string& name) {
  auto& all = modes();
  if (name == "strict") return all.strict;
  if (name == "poison") return all.poison;
  if (name == "deferred") return all.deferred;
  if (name == "validation") return all.validation;
  if (name == "check") return all.check;
  throw py::key_error("no mode named " + name);
}

}  // namespace

PYBIND11_MODULE(_virtual_mps, m) {
  define_shader_library(m);
  m.def("_mps_get_name", [] { return at::mps::MPSDevice::getInstance()->getName(); });
  m.def("_mps_get_core_count", [] { return at::mps::MPSDevice::getInstance()->getCoreCount(); });
  m.def("_mps_host_alias_storage", [](const py::object& storage) {
    return py::reinterpret_steal<py::object>(
        torch::createPyObject(writable_host_alias(torch::createStorage(storage.ptr()))));
  });
  m.def("register_stock_ops", &register_stock_ops);
  m.def("stock_op_calls", &stock_op_calls);
  m.def("configure_executor", [](const std::string& python, const std::string& python_path, const std::string& cache) {
    vmps_configure(python.c_str(), python_path.c_str(), cache.c_str());
  });
  m.def("set_mode", [](const std::string& name, bool on) {
    mode(name) = on;
    if (name == "check") vmps_set_check(on);
  });
  m.def("set_seed", [](uint64_t seed) { vmps_set_seed(seed); });
  m.def("get_mode", [](const std::string& name) -> bool { return mode(name); });
}

}  // namespace vmps
