// The entry points that clang's ARC and message sends call and that GCC's libobjc does not have.
#include <objc/message.h>
#include <objc/objc.h>
#include <objc/runtime.h>

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

extern "C" void* _Block_copy(const void*);

namespace {

SEL selector(const char* name) { return sel_registerName(name); }

id send(id object, SEL sel) { return reinterpret_cast<id (*)(id, SEL)>(objc_msg_lookup(object, sel))(object, sel); }

const SEL kRetain = selector("retain");
const SEL kRelease = selector("release");
const SEL kAutorelease = selector("autorelease");
const SEL kAlloc = selector("alloc");
const SEL kInit = selector("init");

// Zeroing weak references: who points at what, and a dealloc of NSObject that clears them.
struct WeakTable {
  std::recursive_mutex mutex;
  std::unordered_map<id, std::unordered_set<id*>> references;
  std::atomic<size_t> count{0};
};

WeakTable& weak() {
  static auto* table = new WeakTable;
  return *table;
}

IMP plain_dealloc;

void clearing_dealloc(id self, SEL sel) {
  if (weak().count.load(std::memory_order_relaxed)) {
    std::lock_guard<std::recursive_mutex> lock(weak().mutex);
    auto found = weak().references.find(self);
    if (found != weak().references.end()) {
      for (id* location : found->second) *location = nullptr;
      weak().count -= found->second.size();
      weak().references.erase(found);
    }
  }
  reinterpret_cast<void (*)(id, SEL)>(plain_dealloc)(self, sel);
}

void forget(id* location) {
  auto found = weak().references.find(*location);
  if (found == weak().references.end()) return;
  weak().count -= found->second.erase(location);
  if (found->second.empty()) weak().references.erase(found);
}

id remember(id* location, id object) {
  *location = object;
  if (object && weak().references[object].insert(location).second) weak().count++;
  return object;
}

}  // namespace

extern "C" {

struct Slot {
  Class owner, cached_for;
  const char* types;
  int version;
  IMP method;
};

Slot* objc_msg_lookup_sender(id* receiver, SEL sel, id) {
  static thread_local Slot slot;
  slot.method = objc_msg_lookup(*receiver, sel);
  return &slot;
}

Slot* objc_slot_lookup_super(struct objc_super* super, SEL sel) {
  static thread_local Slot slot;
  slot.method = objc_msg_lookup_super(super, sel);
  return &slot;
}

id objc_retain(id object) { return object ? send(object, kRetain) : object; }

void objc_release(id object) {
  if (object) send(object, kRelease);
}

id objc_autorelease(id object) { return object ? send(object, kAutorelease) : object; }
id objc_retainAutorelease(id object) { return objc_autorelease(objc_retain(object)); }
id objc_autoreleaseReturnValue(id object) { return objc_autorelease(object); }
id objc_retainAutoreleaseReturnValue(id object) { return objc_retainAutorelease(object); }
id objc_retainAutoreleasedReturnValue(id object) { return objc_retain(object); }
id objc_unsafeClaimAutoreleasedReturnValue(id object) { return object; }
id objc_retainBlock(id block) { return block ? static_cast<id>(_Block_copy(block)) : block; }

id objc_storeStrong(id* location, id object) {
  id old = *location;
  *location = objc_retain(object);
  objc_release(old);
  return object;
}

void objc_setProperty(id self, SEL sel, size_t offset, id value, BOOL atomic, BOOL copy);  // libobjc's

void objc_setProperty_atomic(id self, SEL sel, id value, ptrdiff_t offset) {
  objc_setProperty(self, sel, offset, value, YES, NO);
}
void objc_setProperty_nonatomic(id self, SEL sel, id value, ptrdiff_t offset) {
  objc_setProperty(self, sel, offset, value, NO, NO);
}
void objc_setProperty_atomic_copy(id self, SEL sel, id value, ptrdiff_t offset) {
  objc_setProperty(self, sel, offset, value, YES, YES);
}
void objc_setProperty_nonatomic_copy(id self, SEL sel, id value, ptrdiff_t offset) {
  objc_setProperty(self, sel, offset, value, NO, YES);
}

id objc_alloc(id cls) { return send(cls, kAlloc); }
id objc_alloc_init(id cls) { return send(objc_alloc(cls), kInit); }

void* objc_autoreleasePoolPush() {
  static const auto pool = reinterpret_cast<id>(objc_getClass("NSAutoreleasePool"));
  return objc_alloc_init(pool);
}

void objc_autoreleasePoolPop(void* pool) { objc_release(static_cast<id>(pool)); }

id objc_initWeak(id* location, id object) {
  std::lock_guard<std::recursive_mutex> lock(weak().mutex);
  return remember(location, object);
}

id objc_storeWeak(id* location, id object) {
  std::lock_guard<std::recursive_mutex> lock(weak().mutex);
  forget(location);
  return remember(location, object);
}

id objc_loadWeakRetained(id* location) {
  std::lock_guard<std::recursive_mutex> lock(weak().mutex);
  return objc_retain(*location);
}

id objc_loadWeak(id* location) { return objc_autorelease(objc_loadWeakRetained(location)); }

void objc_destroyWeak(id* location) {
  std::lock_guard<std::recursive_mutex> lock(weak().mutex);
  forget(location);
}

void objc_copyWeak(id* destination, id* source) {
  std::lock_guard<std::recursive_mutex> lock(weak().mutex);
  remember(destination, *source);
}

void objc_moveWeak(id* destination, id* source) {
  std::lock_guard<std::recursive_mutex> lock(weak().mutex);
  id object = *source;
  forget(source);
  *source = nullptr;
  remember(destination, object);
}
}

__attribute__((constructor)) static void clear_weak_references_on_dealloc() {
  auto object = static_cast<Class>(objc_getClass("NSObject"));
  plain_dealloc = class_replaceMethod(object, selector("dealloc"), reinterpret_cast<IMP>(clearing_dealloc), "v16@0:8");
}
