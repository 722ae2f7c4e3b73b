// A simulated CUDA device for a torch that was built for the CPU. Its tensors are of device "cuda"; their memory is the
// host's, and the CPU's kernels compute on it as soon as they are launched. What a GPU might do in another order is
// found by vector clocks: every stream, event and thread of the host knows how far it comes after each stream.
//
// tests/sham/driver.py loads it before torch and gives torch.cuda the functions that it looks for.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace {
using namespace c10;

constexpr int kDevices = 4, kPool = 32, kStreams = kDevices * (kPool + 1), kHosts = 64;
constexpr size_t kRounding = 512, kWorkspace = 8519680;
constexpr unsigned char kPoison = 0xFF;  // of memory that nobody has written: not a number in every floating type

using Clock = std::array<uint64_t, kStreams>;  // the last work of each stream that something comes after

int device_count = 2;
size_t capacity = size_t{8} << 30;
std::recursive_mutex mutex;
std::array<Clock, kStreams> stream_clocks{};
std::array<Clock, kHosts> host_clocks{};
std::vector<std::string> findings;  // of code that cannot raise; the next launch does
int sync_debug_mode = 0;
thread_local DeviceIndex current = 0;
thread_local std::array<StreamId, kDevices> current_streams{};
thread_local bool unseen = false;  // copies that a GPU would not make
thread_local int host = 0;  // autograd's threads work for the main thread, which waits for them

using Note = void (*)(const char* kind);
Note note = nullptr;
using Found = void (*)(const char* text);
Found found_elsewhere = nullptr;

int index_of(DeviceIndex device, StreamId id) { return device * (kPool + 1) + static_cast<int>(id); }
int stream_of(DeviceIndex device) { return index_of(device, current_streams[device]); }
std::string name_of(int stream) {
  return "stream " + std::to_string(stream % (kPool + 1)) + " of cuda:" + std::to_string(stream / (kPool + 1));
}
void join(Clock& clock, const Clock& other) {
  for (int i = 0; i < kStreams; i++) clock[i] = std::max(clock[i], other[i]);
}
bool knows(const Clock& clock, const Clock& other) {
  for (int i = 0; i < kStreams; i++)
    if (clock[i] < other[i]) return false;
  return true;
}
void report(const std::string& text) {
  findings.push_back(text);
  if (found_elsewhere) found_elsewhere(text.c_str());
}
void raise_findings() {
  if (findings.empty()) return;
  std::string text;
  for (const auto& one : findings) text += (text.empty() ? "" : "; ") + one;
  findings.clear();
  TORCH_CHECK(false, "simulated GPU: ", text);
}

// ---- memory --------------------------------------------------------------------------------------------------------

struct Access {
  const char *low, *high;
  int stream;
  uint64_t when;
  bool writes;
  const char* name;
};

// An allocation of a device, or pinned memory of the host, with the accesses that later ones must come after.
struct Block {
  char* data;
  size_t bytes;
  DeviceIndex device = -1;  // of pinned memory
  int stream = 0;           // whose later allocations may reuse it
  Storage made_by_cpu;      // memory that a kernel of the CPU has allocated
  std::vector<Access> accesses{};
  std::set<int> users{};  // of record_stream
};

struct Usage {
  int64_t bytes = 0, peak = 0;
};
std::array<Usage, kDevices> usages;
std::map<const char*, Block*> pinned;  // by its end
std::set<std::pair<std::thread::id, int>> workspaces;

size_t rounded(size_t bytes) { return (bytes + kRounding - 1) / kRounding * kRounding; }

void take(DeviceIndex device, size_t bytes) {
  std::lock_guard lock(mutex);
  auto& usage = usages[device];
  TORCH_CHECK_WITH(OutOfMemoryError, usage.bytes + rounded(bytes) <= capacity, "CUDA out of memory. Tried to allocate ",
                   bytes, " bytes, ", capacity - usage.bytes, " are free");
  usage.bytes += rounded(bytes);
  usage.peak = std::max(usage.peak, usage.bytes);
}

void give_back(void* context) {
  auto* block = static_cast<Block*>(context);
  std::lock_guard lock(mutex);
  // The last reference goes after all others: what any thread of the host has waited for before it let go, has ended.
  Clock home = stream_clocks[block->stream];
  for (const auto& thread : host_clocks) join(home, thread);
  for (const auto& a : block->accesses)
    if (a.stream != block->stream && !block->users.count(a.stream) && home[a.stream] < a.when)
      report(std::string("memory of ") + name_of(block->stream) + " is freed while " + a.name + " of " +
             name_of(a.stream) + " may still use it");
  usages[block->device].bytes -= rounded(block->bytes);
  memset(block->data, kPoison, block->bytes);
  if (!block->made_by_cpu) free(block->data);
  delete block;
}

DataPtr own(char* data, size_t bytes, DeviceIndex device, Storage made_by_cpu) {
  auto* block = new Block{data, bytes, device, stream_of(device), std::move(made_by_cpu)};
  return {data, block, &give_back, Device(DeviceType::CUDA, device)};
}

struct DeviceMemory final : DeviceAllocator {
  DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, Device(DeviceType::CUDA, current)};
    take(current, bytes);
    auto* data = static_cast<char*>(aligned_alloc(kRounding, rounded(bytes)));
    memset(data, kPoison, bytes);
    return own(data, bytes, current, {});
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(MempoolId_t) override {}
  void recordStream(const DataPtr& data, Stream s) override {
    std::lock_guard lock(mutex);
    if (data.get_context()) static_cast<Block*>(data.get_context())->users.insert(index_of(s.device_index(), s.id()));
  }
  CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    CachingDeviceAllocator::DeviceStats stats;
    for (auto* figures : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      (*figures)[0].current = usages[device].bytes;
      (*figures)[0].peak = usages[device].peak;
    }
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { usages[device].peak = usages[device].bytes; }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    return {capacity - usages[device].bytes, capacity};
  }
} device_memory;
REGISTER_ALLOCATOR(DeviceType::CUDA, &device_memory)

Block* pinned_block(const void* data) {
  auto it = pinned.upper_bound(static_cast<const char*>(data));
  return it != pinned.end() && it->second->data <= data ? it->second : nullptr;
}

void pin(char* data, size_t bytes) { pinned[data + bytes] = new Block{data, bytes}; }

struct PinnedMemory final : Allocator {
  static void release(void* data) {
    std::lock_guard lock(mutex);
    auto* block = pinned_block(data);
    pinned.erase(block->data + block->bytes);
    delete block;
    free(data);
  }
  DataPtr allocate(size_t bytes) override {
    std::lock_guard lock(mutex);
    auto* data = static_cast<char*>(aligned_alloc(kRounding, rounded(std::max<size_t>(bytes, 1))));
    memset(data, kPoison, bytes);
    pin(data, rounded(std::max<size_t>(bytes, 1)));
    return {data, data, &release, Device(DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
} pinned_memory;

// ---- order ---------------------------------------------------------------------------------------------------------

// A copy between device and pinned memory that the host has not waited for.
struct Pending {
  int stream;
  uint64_t when;
  at::Tensor memory;  // of the host
  at::Tensor value;   // what it will hold, or what it must still hold
  bool to_host;
  const char* low() const { return static_cast<const char*>(memory.const_data_ptr()); }
  const char* high() const { return low() + memory.nbytes(); }
};
std::vector<Pending> pending;

// Work of a stream; it comes after what the launching thread has waited for.
uint64_t launch(int stream) {
  raise_findings();
  join(stream_clocks[stream], host_clocks[host]);
  return ++stream_clocks[stream][stream];
}

// Ends the copies with some memory, all of it inside a range, that a clock knows.
void land_copies(const Clock& clock, const char* low = nullptr, const char* high = reinterpret_cast<const char*>(-1)) {
  auto copies = std::move(pending);
  pending.clear();
  for (auto& copy : copies) {
    if (clock[copy.stream] < copy.when || copy.low() < low || high < copy.high()) {
      pending.push_back(std::move(copy));
      continue;
    }
    size_t bytes = copy.memory.nbytes();
    if (copy.to_host)
      memcpy(copy.memory.mutable_data_ptr(), copy.value.const_data_ptr(), bytes);
    else if (memcmp(copy.memory.const_data_ptr(), copy.value.const_data_ptr(), bytes) != 0)
      report("pinned memory was overwritten before its copy to the device had ended");
  }
}

// Pinned memory as a stream finds it: with what copies that it comes after have put there, though the host knows of none.
at::Tensor as_found_by(int stream, const at::Tensor& memory) {
  at::Tensor found = memory;
  auto* start = static_cast<const char*>(memory.const_data_ptr());
  for (const auto& copy : pending) {
    auto low = std::max(copy.low(), start), high = std::min(copy.high(), start + memory.nbytes());
    if (!copy.to_host || high <= low || stream_clocks[stream][copy.stream] < copy.when) continue;
    if (found.is_same(memory)) found = memory.clone();
    memcpy(static_cast<char*>(found.mutable_data_ptr()) + (low - start),
           static_cast<const char*>(copy.value.const_data_ptr()) + (low - copy.low()), high - low);
  }
  return found;
}

void host_waits(const Clock& clock, const char* kind, bool warns = false) {
  if (unseen) return;
  bool is_known;  // that all of it has ended: then there is no wait
  {
    std::lock_guard lock(mutex);
    is_known = knows(host_clocks[host], clock);
    join(host_clocks[host], clock);
    land_copies(host_clocks[host]);
  }
  if (note && !is_known) note(kind);
  if (warns && sync_debug_mode) TORCH_WARN("called a synchronizing CUDA operation");
  std::lock_guard lock(mutex);
  raise_findings();
}

void host_waits_for_stream(int stream, const char* kind, bool warns = true) {
  Clock clock;
  {
    std::lock_guard lock(mutex);
    clock = stream_clocks[stream];
  }
  host_waits(clock, kind, warns);
}

void access(Block* block, const char* low, const char* high, int stream, uint64_t when, bool writes, const char* name) {
  auto& all = block->accesses;
  for (const auto& a : all)
    if (a.stream != stream && (writes || a.writes) && a.low < high && low < a.high &&
        stream_clocks[stream][a.stream] < a.when) {
      auto text = std::string("race: ") + name + " of " + name_of(stream) + (writes ? " writes" : " reads") + " what " +
                  a.name + " of " + name_of(a.stream) + (a.writes ? " writes" : " reads") + ", without an order";
      report(text);
      raise_findings();
    }
  // Whatever is ordered after this access is ordered after those that it replaces.
  auto replaced = [&](const Access& a) { return low <= a.low && a.high <= high && (writes || (a.stream == stream && !a.writes)); };
  all.erase(std::remove_if(all.begin(), all.end(), replaced), all.end());
  all.push_back({low, high, stream, when, writes, name});
}

bool is_ours(const at::Tensor& t) { return t.defined() && t.device().type() == DeviceType::CUDA; }

void access(const at::Tensor& t, int stream, uint64_t when, bool writes, const char* name) {
  if (t.numel() == 0) return;
  auto* low = static_cast<const char*>(t.const_data_ptr());
  int64_t last = 0;
  for (int i = 0; i < t.dim(); i++) last += (t.size(i) - 1) * t.stride(i);
  auto* block = is_ours(t) ? static_cast<Block*>(t.storage().data_ptr().get_context()) : pinned_block(low);
  if (block) access(block, low, low + (last + 1) * t.element_size(), stream, when, writes, name);
}

// ---- devices, streams and events -----------------------------------------------------------------------------------

struct Mark {
  Clock clock;
  std::chrono::steady_clock::time_point time;
};

struct Guard final : impl::DeviceGuardImplInterface {
  static int of(const Stream& s) { return index_of(s.device_index(), s.id()); }
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return {DeviceType::CUDA, current}; }
  Device exchangeDevice(Device d) const override {
    auto before = getDevice();
    setDevice(d);
    return before;
  }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < device_count, "CUDA error: invalid device ordinal");
    uncheckedSetDevice(d);
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) current = d.index();
  }
  DeviceIndex deviceCount() const noexcept override { return device_count; }
  Stream getStream(Device d) const override {
    auto index = d.has_index() ? d.index() : current;
    return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, index), current_streams[index]);
  }
  Stream getDefaultStream(Device d) const override {
    return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, d.has_index() ? d.index() : current), 0);
  }
  Stream getNewStream(Device d, int) const override {
    static std::array<int, kDevices> made{};
    auto index = d.has_index() ? d.index() : current;
    return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, index), 1 + made[index]++ % kPool);
  }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream exchangeStream(Stream s) const override {
    auto before = getStream(s.device());
    current_streams[s.device_index()] = s.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream s) const override { return reinterpret_cast<void*>(s.id()); }
  void record(void** event, const Stream& s, const DeviceIndex, const EventFlag) const override {
    std::lock_guard lock(mutex);
    if (!*event) *event = new Mark;
    launch(of(s));
    *static_cast<Mark*>(*event) = {stream_clocks[of(s)], std::chrono::steady_clock::now()};
  }
  void block(void* event, const Stream& s) const override {
    std::lock_guard lock(mutex);
    if (event) join(stream_clocks[of(s)], static_cast<Mark*>(event)->clock);
  }
  // A question is no wait: whoever asks learns nothing about the order of accesses.
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    if (event) host_waits(static_cast<Mark*>(event)->clock, "event.synchronize");
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    auto taken = static_cast<Mark*>(end)->time - static_cast<Mark*>(start)->time;
    return std::chrono::duration<double, std::milli>(taken).count();
  }
  bool queryStream(const Stream& s) const override {
    host_waits_for_stream(of(s), "stream.query", false);
    return true;
  }
  void synchronizeStream(const Stream& s) const override { host_waits_for_stream(of(s), "stream.synchronize"); }
  void synchronizeDevice(const DeviceIndex device) const override {
    Clock clock{};
    {
      std::lock_guard lock(mutex);
      for (int id = 0; id <= kPool; id++) join(clock, stream_clocks[index_of(device, id)]);
    }
    host_waits(clock, "synchronize");
  }
  void recordDataPtrOnStream(const DataPtr& data, const Stream& s) const override { device_memory.recordStream(data, s); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// A generator for each device; the kernels of the CPU take numbers from it.
std::array<at::Generator, kDevices> generators;

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return device_count; }
  int getNumGPUs() const override { return device_count; }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex d) const override { Guard().setDevice({DeviceType::CUDA, d}); }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return Guard().exchangeDevice({DeviceType::CUDA, d}).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard lock(mutex);
    return pinned_block(data);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override {
    auto& own = generators[d < 0 ? current : d];
    if (!own.defined()) own = at::detail::createCPUGenerator();
    return own;
  }
  // The first one that is asked for is the device's own: torch.cuda.default_generators holds it.
  at::Generator getNewGenerator(DeviceIndex d) const override {
    auto& own = generators[d < 0 ? current : d];
    return own.defined() ? at::detail::createCPUGenerator() : getDefaultGenerator(d);
  }
  void deviceSynchronize(DeviceIndex d) const override { Guard().synchronizeDevice(d); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)

// ---- kernels -------------------------------------------------------------------------------------------------------

// The same memory as a tensor of the CPU, for as long as a kernel runs.
at::Tensor on_cpu(const at::Tensor& t) {
  if (!is_ours(t)) return t;
  auto& storage = t.storage();
  Storage memory(Storage::use_byte_size_t(), storage.nbytes(), DataPtr(storage.mutable_data(), Device(DeviceType::CPU)),
                 GetCPUAllocator(), true);
  auto out = at::detail::make_tensor<TensorImpl>(std::move(memory), DispatchKeySet(DispatchKey::CPU), t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return t.is_conj() ? out.conj() : out;
}

at::Tensor like(const at::Tensor& t, Storage storage) {
  auto out = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CUDA), t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return out;
}

Storage on_device(const Storage& made, DeviceIndex device) {
  auto* data = static_cast<char*>(made.mutable_data());
  DataPtr owned(nullptr, Device(DeviceType::CUDA, device));
  if (data) {
    take(device, made.nbytes());
    owned = own(data, made.nbytes(), device, made);
  }
  return Storage(Storage::use_byte_size_t(), made.nbytes(), std::move(owned), &device_memory, true);
}

const std::set<std::string> kProducts{"aten::addmm", "aten::mm", "aten::bmm", "aten::baddbmm", "aten::addmv"};
const std::set<std::string> kSyncing{"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal",
                                     "aten::unique_consecutive", "aten::repeat_interleave"};

// A call of an operator: its tensors as the CPU's, its results as the device's.
class Call {
 public:
  Call(const OperatorHandle& op, torch::jit::Stack& stack) : op_(op), stack_(stack), name_(op.schema().name()) {
    auto& arguments = op.schema().arguments();
    auto first = stack.size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); i++) {
      auto* alias = arguments[i].alias_info();
      writes_ = alias && alias->isWrite();
      replace(stack[first + i], arguments[i].name());
    }
    if (device_ < 0) device_ = wanted_;
  }

  void run() {
    auto stream = stream_of(device_);
    {
      std::lock_guard lock(mutex);
      when_ = launch(stream);
      for (auto& [t, writes] : given_) access(t, stream, when_, writes, name_.c_str());
      // The first product of a thread on a stream takes a workspace.
      if (kProducts.count(name_) && workspaces.emplace(std::this_thread::get_id(), stream).second)
        take(device_, kWorkspace);
    }
    if (syncs_ || kSyncing.count(name_)) host_waits_for_stream(stream, name_.c_str());
    at::AutoDispatchBelowADInplaceOrView below;
    op_.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack_);
    auto first = stack_.size() - op_.schema().returns().size();
    for (size_t i = first; i < stack_.size(); i++) give(stack_[i]);
  }

 private:
  void replace(IValue& value, const std::string& argument) {
    if (value.isTensor()) {
      value = take_in(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(take_in(t));
      value = list;
    } else if (value.isList() && value.toList().elementType()->kind() == TypeKind::OptionalType) {
      c10::List<std::optional<at::Tensor>> list;
      for (const IValue& one : value.toListRef())
        list.push_back(one.isNone() ? std::optional<at::Tensor>() : take_in(one.toTensor(), true));
      value = list;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      if (value.toDevice().has_index()) wanted_ = value.toDevice().index();
      value = Device(DeviceType::CPU);
    } else if (value.isNone() && argument == "generator") {
      value = Hooks({}).getDefaultGenerator(device_ < 0 ? wanted_ : device_);
    }
  }

  at::Tensor take_in(const at::Tensor& t, bool is_index = false) {
    if (!t.defined()) return t;
    if (is_index && (t.scalar_type() == kBool || t.scalar_type() == kByte)) syncs_ = true;
    if (!is_ours(t)) {
      TORCH_CHECK(t.dim() == 0 || is_index, "Expected all tensors to be on the same device, but got one on ", t.device(), " in ", name_);
      return t;
    }
    if (device_ < 0) device_ = t.device().index();
    TORCH_CHECK(device_ == t.device().index(), "Expected all tensors to be on the same device, but found cuda:", device_, " and ", t.device(), " in ", name_);
    auto cpu = on_cpu(t);
    given_.emplace_back(t, writes_);
    by_cpu_[cpu.unsafeGetTensorImpl()] = t;
    kept_.push_back(cpu);
    return cpu;
  }

  void give(IValue& value) {
    if (value.isTensor()) {
      value = result(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : value.toTensorVector()) list.push_back(result(t));
      value = list;
    }
  }

  at::Tensor result(const at::Tensor& t) {
    if (!t.defined()) return t;
    auto data = t.storage().data();
    if (auto it = by_cpu_.find(t.unsafeGetTensorImpl()); it != by_cpu_.end()) {
      auto* own = it->second.unsafeGetTensorImpl();
      if (it->second.storage().data() != data) own->set_storage_keep_dtype(on_device(t.storage(), device_));
      own->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
      return it->second;
    }
    for (auto& [given, _] : given_)
      if (data && given.storage().data() == data) return like(t, given.storage());  // a view
    auto made = like(t, on_device(t.storage(), device_));
    std::lock_guard lock(mutex);
    access(made, stream_of(device_), when_, true, name_.c_str());
    return made;
  }

  const OperatorHandle& op_;
  torch::jit::Stack& stack_;
  const std::string& name_;
  int device_ = -1;
  DeviceIndex wanted_ = current;
  bool writes_ = false, syncs_ = false;
  uint64_t when_ = 0;
  std::vector<std::pair<at::Tensor, bool>> given_;
  std::vector<at::Tensor> kept_;
  std::unordered_map<TensorImpl*, at::Tensor> by_cpu_;
};

void fallback(const OperatorHandle& op, torch::jit::Stack* stack) { Call(op, *stack).run(); }

DeviceIndex place(std::optional<Device> device) {
  auto index = device && device->has_index() ? device->index() : current;
  TORCH_CHECK(index < device_count, "CUDA error: invalid device ordinal");
  return index;
}

at::Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device> device,
                 std::optional<bool>, std::optional<MemoryFormat> format) {
  impl::VirtualGuardImpl guard(DeviceType::CUDA);
  auto before = guard.exchangeDevice({DeviceType::CUDA, place(device)});
  auto out = at::detail::empty_generic(size, &device_memory, DispatchKeySet(DispatchKey::CUDA),
                                       dtype.value_or(at::get_default_dtype_as_scalartype()), format);
  guard.setDevice(before);
  return out;
}

at::Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype, std::optional<Layout>,
                         std::optional<Device> device, std::optional<bool>) {
  auto flat = empty({}, dtype, {}, device, {}, {});
  auto bytes = at::detail::computeStorageNbytes(size, stride, flat.element_size());
  auto out = empty({static_cast<int64_t>(bytes / flat.element_size())}, dtype, {}, device, {}, {});
  out.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  return out;
}

void copy_on_device(const at::Tensor& to, const at::Tensor& from) {
  std::lock_guard lock(mutex);
  auto stream = stream_of(from.device().index()), other = stream_of(to.device().index());
  join(stream_clocks[stream], stream_clocks[other]);
  auto when = launch(stream);
  access(from, stream, when, false, "copy_");
  access(to, stream, when, true, "copy_");
  join(stream_clocks[other], stream_clocks[stream]);
  on_cpu(to).copy_(on_cpu(from));
}

bool is_flat(const at::Tensor& t) { return t.is_non_overlapping_and_dense(); }

// Between host and device. Only a copy of as many bytes from or into pinned memory lets the host go on.
void copy_across(const at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  bool to_host = is_ours(from);
  auto &near = to_host ? from : to, &far = to_host ? to : from;
  auto stream = stream_of(near.device().index());
  bool is_pinned = pinned_block(far.const_data_ptr()) != nullptr;
  bool is_asynchronous = non_blocking && is_pinned && is_flat(far) && to.dtype() == from.dtype();
  at::Tensor source = from;
  {
    std::lock_guard lock(mutex);
    auto when = launch(stream);
    access(from, stream, when, false, "copy_");
    access(to, stream, when, true, "copy_");
    if (is_pinned && !to_host && is_flat(far)) source = as_found_by(stream, from);
    if (is_asynchronous) {
      auto value = at::empty_like(far, far.options());
      value.copy_(on_cpu(source));
      if (to_host) {
        auto* low = static_cast<char*>(far.mutable_data_ptr());
        land_copies(stream_clocks[stream], low, low + far.nbytes());
        memset(low, kPoison, far.nbytes());
      } else {
        on_cpu(to).copy_(source);
      }
      pending.push_back({stream, when, far, value, to_host});
      return;
    }
  }
  on_cpu(to).copy_(on_cpu(source));
  auto kind = std::string(non_blocking ? "pageable copy " : "copy ") + (to_host ? "to host" : "to device");
  host_waits_for_stream(stream, kind.c_str(), !non_blocking);
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  if (is_ours(self) && is_ours(source))
    copy_on_device(self, source);
  else
    copy_across(self, source.sizes() == self.sizes() ? source : source.expand(self.sizes()), non_blocking);
  return self;
}

Scalar item(const at::Tensor& self) {
  auto stream = stream_of(self.device().index());
  {
    std::lock_guard lock(mutex);
    access(self, stream, launch(stream), false, "item");
  }
  host_waits_for_stream(stream, "item");
  return on_cpu(self).item();
}

const at::Tensor& resize_(const at::Tensor& self, IntArrayRef size, std::optional<MemoryFormat>) {
  auto* own = self.unsafeGetTensorImpl();
  auto bytes = c10::multiply_integers(size) * self.element_size() + self.storage_offset() * self.element_size();
  if (static_cast<size_t>(bytes) > self.storage().nbytes()) {
    auto larger = empty({bytes}, kByte, {}, self.device(), {}, {});
    auto count = self.storage().nbytes();
    if (count) copy_on_device(larger.narrow(0, 0, count), empty({0}, kByte, {}, self.device(), {}, {}).set_(self.storage()));
    own->set_storage_keep_dtype(larger.storage());
  }
  own->set_sizes_contiguous(size);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, Storage source) {
  auto count = static_cast<int64_t>(source.nbytes() / self.element_size());
  return at::native::set_storage_cpu_(self, std::move(source), 0, {count}, {});
}

void record_stream(at::Tensor& self, Stream s) { Guard().recordDataPtrOnStream(self.storage().data_ptr(), s); }

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  auto mask = at::empty_like(input, input.options().dtype(kBool));
  if (!train.value_or(true)) return {input.clone(), mask.fill_(true)};
  mask.bernoulli_(1 - p);
  return {input.mul(mask).mul_(p < 1 ? 1 / (1 - p) : 0), mask};
}

// Attention by its formula: the CPU has no kernels with the signatures of CUDA's.
int64_t fused_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                        double, bool, std::optional<double>, bool) {
  return 0;
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_local_scalar_dense", item);
  m.impl("resize_", resize_);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", native_dropout);
  m.impl("_fused_sdp_choice", fused_attention);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
}
}  // namespace

// ---- the driver's functions ----------------------------------------------------------------------------------------

extern "C" {
void sham_begin(int devices, uint64_t bytes, Note noted, Found found) {
  device_count = devices;
  capacity = bytes;
  note = noted;
  found_elsewhere = found;
}
// Gives a storage other memory, without its contents: torch's own function for that is not in a build without CUDA.
void sham_resize(void* storage, int device, uint64_t bytes) {
  auto* impl = static_cast<StorageImpl*>(storage);
  auto before = current;
  current = device;
  impl->set_data_ptr(device_memory.allocate(bytes));
  impl->set_nbytes(bytes);
  current = before;
}
int sham_device_count() { return device_count; }
int sham_device() { return current; }
void sham_set_device(int device) { current = device; }
int64_t sham_stream(int device) { return current_streams[device]; }
void sham_set_stream(int device, int64_t id) { current_streams[device] = id; }
double sham_elapsed_ms(void* start, void* end) {
  std::lock_guard lock(mutex);
  bool has_ended = knows(host_clocks[host], static_cast<Mark*>(start)->clock) && knows(host_clocks[host], static_cast<Mark*>(end)->clock);
  return has_ended ? Guard().elapsedTime(start, end, 0) : NAN;
}
void sham_set_sync_debug_mode(int mode) { sync_debug_mode = mode; }
int64_t sham_bytes(int device) { return usages[device].bytes; }
int64_t sham_peak(int device) { return usages[device].peak; }
uint64_t sham_capacity() { return capacity; }
void sham_forget_peak(int device) { device_memory.resetPeakStats(device); }
void sham_clear_workspaces() {
  std::lock_guard lock(mutex);
  for (auto& [_, stream] : workspaces) usages[stream / (kPool + 1)].bytes -= rounded(kWorkspace);
  workspaces.clear();
}
void sham_pin(char* data, uint64_t bytes) {
  std::lock_guard lock(mutex);
  pin(data, bytes);
}
void sham_unpin(char* data) {
  std::lock_guard lock(mutex);
  auto* block = pinned_block(data);
  for (const auto& a : block->accesses)
    if (host_clocks[host][a.stream] < a.when)
      report(std::string("pinned memory is given back while ") + a.name + " of " + name_of(a.stream) + " may still use it");
  pinned.erase(block->data + block->bytes);
  delete block;
}
void sham_set_host(int number) { host = number; }
void sham_set_unseen(int is_unseen) { unseen = is_unseen; }
int sham_clock_size() { return kStreams; }
void sham_host_clock(uint64_t* clock) {
  std::lock_guard lock(mutex);
  std::copy(host_clocks[host].begin(), host_clocks[host].end(), clock);
}
void sham_host_joins(const uint64_t* clock) {
  std::lock_guard lock(mutex);
  for (int i = 0; i < kStreams; i++) host_clocks[host][i] = std::max(host_clocks[host][i], clock[i]);
  land_copies(host_clocks[host]);
}
}
