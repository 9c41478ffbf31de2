// at::MPSGeneratorImpl, with the state layout of a Mac: seven words and the seed. Word 0 counts draws; words 1 to 4 are
// the Philox block of that count, 5 and 6 the key.
#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Utils.h>
#include <ATen/core/Tensor.h>
#include <ATen/mps/MPSGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <cstring>

#include "memory.h"

namespace at {
namespace mps::detail {

const Generator& getDefaultMPSGenerator() {
  static auto* generator = new Generator(make_generator<MPSGeneratorImpl>(c10::default_rng_seed_val));
  return *generator;
}

Generator createMPSGenerator(uint64_t seed) { return make_generator<MPSGeneratorImpl>(seed); }

}  // namespace mps::detail

MPSGeneratorImpl::MPSGeneratorImpl(uint64_t seed)
    : c10::GeneratorImpl{vmps::kDevice, DispatchKeySet(c10::DispatchKey::MPS)} {
  set_current_seed(seed);
}

void MPSGeneratorImpl::set_current_seed(uint64_t seed) {
  data_.seed = seed;
  data_.state.fill(0);
  data_.state[5] = static_cast<uint32_t>(seed);
  data_.state[6] = static_cast<uint32_t>(seed >> 32);
  engine_ = Philox4_32(seed);
}

void MPSGeneratorImpl::update_philox_counters() {
  data_.state[0]++;
  engine_ = Philox4_32(data_.seed, /*subsequence=*/0, /*offset=*/data_.state[0]);
  for (int i = 1; i <= 4; i++) data_.state[i] = engine_();
}

void MPSGeneratorImpl::set_offset(uint64_t) { TORCH_CHECK(false, "MPS Generator does not use offset"); }
uint64_t MPSGeneratorImpl::get_offset() const { TORCH_CHECK(false, "MPS Generator does not use offset"); }
uint64_t MPSGeneratorImpl::current_seed() const { return data_.seed; }

uint64_t MPSGeneratorImpl::seed() {
  const uint64_t random = c10::detail::getNonDeterministicRandom();
  set_current_seed(random);
  return random;
}

constexpr size_t kStateBytes = sizeof(mps::detail::rng_data_pod::state);
constexpr size_t kAllBytes = kStateBytes + sizeof(uint64_t);

c10::intrusive_ptr<c10::TensorImpl> MPSGeneratorImpl::get_state() const {
  auto tensor = at::empty({static_cast<int64_t>(kAllBytes)}, at::kByte);
  auto* bytes = tensor.mutable_data_ptr<uint8_t>();
  std::memcpy(bytes, data_.state.data(), kStateBytes);
  std::memcpy(bytes + kStateBytes, &data_.seed, sizeof data_.seed);
  return tensor.getIntrusivePtr();
}

void MPSGeneratorImpl::set_state(const c10::TensorImpl& state) {
  at::detail::check_rng_state(state);
  TORCH_CHECK(state.numel() == static_cast<int64_t>(kAllBytes), "RNG state is wrong size");
  const auto* bytes = static_cast<const uint8_t*>(state.data());
  uint64_t seed;
  std::memcpy(&seed, bytes + kStateBytes, sizeof seed);
  set_current_seed(seed);
  std::memcpy(data_.state.data(), bytes, kStateBytes);
}

std::shared_ptr<MPSGeneratorImpl> MPSGeneratorImpl::clone() const {
  return std::shared_ptr<MPSGeneratorImpl>(clone_impl());
}

MPSGeneratorImpl* MPSGeneratorImpl::clone_impl() const {
  auto* copy = new MPSGeneratorImpl(data_.seed);
  copy->data_ = data_;
  copy->engine_ = engine_;
  return copy;
}

}  // namespace at

namespace vmps {

const at::Generator& default_generator() { return at::mps::detail::getDefaultMPSGenerator(); }

at::Generator generator_for_draw(const at::Generator& mps) {
  auto* generator = static_cast<at::MPSGeneratorImpl*>(mps.unsafeGetGeneratorImpl());
  std::lock_guard<std::mutex> lock(generator->mutex_);
  generator->update_philox_counters();
  const uint32_t* words = generator->state_data();
  return at::detail::createCPUGenerator(words[1] | static_cast<uint64_t>(words[2]) << 32);
}

}  // namespace vmps
