// A device that torch does not know: its memory is its own, with a size, a limit and statistics, and its
// products are the CPU's. An operation that is given tensors of two devices fails, as it does on a card.
//
// It is what PyTorch calls PrivateUse1; tests call it "pretend".

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);
const c10::Stream kStream(c10::Stream::DEFAULT, kDevice);
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// ------------------------------------------------------------------------------------- memory

class Allocator final : public c10::DeviceAllocator {
 public:
  int64_t total = int64_t(8) << 30;
  int64_t limit = total;

  at::DataPtr allocate(size_t wanted) override {
    std::lock_guard<std::mutex> guard(mutex_);
    const size_t size = (wanted + 511) / 512 * 512;
    TORCH_CHECK_WITH(OutOfMemoryError, allocated_ + int64_t(size) <= limit,
        "pretend out of memory. Tried to allocate ", size, " bytes; ", allocated_, " of ", limit, " are in use");
    void* pointer = size ? std::aligned_alloc(512, size) : nullptr;
    if (pointer) {
      sizes_[pointer] = size;
      allocated_ += size;
      peak_ = std::max(peak_, allocated_);
    }
    return {pointer, pointer, &free, kDevice};
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> guard(mutex_);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes}) {
      (*bytes)[0].current = allocated_;
      (*bytes)[0].peak = peak_;
    }
    return stats;
  }

  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> guard(mutex_);
    peak_ = allocated_;
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    return {size_t(total - allocated_), size_t(total)};
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const at::DataPtr&, c10::Stream) override {}
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  at::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }

 private:
  static void free(void* pointer);

  std::mutex mutex_;
  std::unordered_map<void*, size_t> sizes_;
  int64_t allocated_ = 0, peak_ = 0;
};

Allocator allocator;
REGISTER_ALLOCATOR(kType, &allocator);

void Allocator::free(void* pointer) {
  if (!pointer) return;
  std::lock_guard<std::mutex> guard(allocator.mutex_);
  allocator.allocated_ -= allocator.sizes_.at(pointer);
  allocator.sizes_.erase(pointer);
  std::free(pointer);
}

// ------------------------------------------------------------- one device with one stream, no waiting

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return kStream; }
  c10::Stream getDefaultStream(c10::Device) const override { return kStream; }
  c10::Stream getNewStream(c10::Device, int) const override { return kStream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return kStream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto data = allocator.allocate(size);
    std::memcpy(data.get(), storage.data(), std::min<size_t>(size, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

// ----------------------------------------------------------------------------------- operations

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator, kKeys, c10::dtype_or_default(dtype));
}

at::Tensor on_host(const at::Tensor& tensor) {  // the same memory, as a driver sees it
  if (!tensor.is_privateuseone()) return tensor;
  at::DataPtr data(const_cast<void*>(tensor.storage().data()), at::kCPU);
  at::Storage storage(at::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data));
  return at::empty({0}, at::TensorOptions().dtype(tensor.scalar_type()))
      .set_(storage, tensor.storage_offset(), tensor.sizes(), tensor.strides());
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t needed = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  if (needed > impl->storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(impl->storage(), needed);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

const std::set<std::string> kMixing = {"aten::index", "aten::index_put", "aten::index_put_",
                                       "aten::_index_put_impl_"};  // indices may lie on the CPU, on CUDA too

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  bool here = false, elsewhere = false;
  auto look = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    (tensor.is_privateuseone() ? here : elsewhere) |= tensor.is_privateuseone() || tensor.dim() > 0;
  };
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) look(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector()) look(tensor);
    if (value.isOptionalTensorList())
      for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
        if (tensor) look(*tensor);
  }
  TORCH_CHECK(!(here && elsewhere) || kMixing.count(op.schema().name()),
              "Expected all tensors to be on the same device in ", op.schema().name());
  at::native::cpu_fallback(op, stack);
}

int64_t plain_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                        const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

}  // namespace

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &plain_attention);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize_);
  m.impl("as_strided", at::cpu::as_strided);
  m.impl("_reshape_alias", at::cpu::_reshape_alias);
  m.impl("view", at::cpu::view);
  m.impl("unfold", at::cpu::unfold);
  m.impl("set_.source_Storage_storage_offset",
         static_cast<at::Tensor& (*)(at::Tensor&, at::Storage, int64_t, at::IntArrayRef, at::IntArrayRef)>(
             at::cpu::set_));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

// Nothing is computed in less than its tensors' precision.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

static Hooks hooks;
static const bool registered = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

extern "C" void set_memory(int64_t bytes) { allocator.total = allocator.limit = bytes; }
extern "C" void set_limit(int64_t bytes) { allocator.limit = bytes; }
