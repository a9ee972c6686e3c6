// A CUDA device for a torch that was built without CUDA, so that autograd and fake tensors take device "cuda".
// Nothing runs on it: guards do nothing, and every question about a device is answered 0. Streams are numbers, of
// which 0 is the default one. A thread has a current one, as autograd's threads do for what ran on it before; what
// autograd orders by events is told to `omni_hear`'s listener.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdint>

namespace {

// What a listener hears of: an event is put on a stream, a stream waits for it, a storage stays until a stream is
// done with it.
enum Heard { MARK, WAIT, KEEP };
using Listener = void (*)(int heard, int64_t event_or_storage, int64_t stream);

Listener listener = nullptr;
thread_local int64_t current = 0;

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

struct NoopGuard final : public c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  Device exchangeDevice(Device device) const override { return device; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }

  Stream getStream(Device device) const override { return Stream(Stream::UNSAFE, device, current); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int = 0) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const override {
    Stream before = getStream(stream.device());
    current = stream.id();
    return before;
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new char;
    tell(MARK, *event, stream);
  }
  void block(void* event, const Stream& stream) const override { tell(WAIT, event, stream); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    // Fake storages have no data: which one it is, the place of its field tells.
    static const c10::StorageImpl probe(c10::StorageImpl::use_byte_size_t(), 0, c10::DataPtr(), nullptr, false);
    static const auto offset =
        reinterpret_cast<const char*>(&probe.data_ptr()) - reinterpret_cast<const char*>(&probe);
    tell(KEEP, reinterpret_cast<const char*>(&data) - offset, stream);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<char*>(event); }
  bool queryEvent(void*) const override { return true; }

 private:
  static void tell(Heard heard, const void* of, const Stream& stream) {
    if (listener != nullptr) listener(heard, reinterpret_cast<int64_t>(of), stream.id());
  }
};

// Autograd makes a thread for each device that the hooks count. torch finds them by the name of their class.
struct CUDAHooks final : public at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};

C10_REGISTER_GUARD_IMPL(CUDA, NoopGuard)

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace

extern "C" {
int64_t omni_current_stream() { return current; }
void omni_enter_stream(int64_t stream) { current = stream; }
void omni_hear(Listener heard) { listener = heard; }
}
