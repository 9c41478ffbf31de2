// The blocks runtime. The distribution's libBlocksRuntime does not retain the objects that a block captures, and its
// blocks are not objects: here they are both, as on a Mac. Layout: https://clang.llvm.org/docs/Block-ABI-Apple.html
#include <objc/message.h>
#include <objc/objc.h>
#include <objc/runtime.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

extern "C" {
id objc_retain(id);
void objc_release(id);
void* _Block_copy(const void*);
void _Block_release(const void*);
void __objc_exec_class(void* module);  // module.cpp; leaves alone what clang did not lay out

// The isa of a block is one of these; start() below builds a class in each.
void* _NSConcreteStackBlock[32];
void* _NSConcreteMallocBlock[32];
void* _NSConcreteGlobalBlock[32];
}

namespace {

enum : int {
  kReferenceMask = 0xfffe,
  kReference = 2,
  kNeedsFree = 1 << 24,
  kHasCopyDispose = 1 << 25,
  kIsGlobal = 1 << 28,
  kByrefLayoutMask = 0xf << 28,
  kByrefHasLayout = 1 << 28,
};

enum : int {
  kFieldObject = 3,
  kFieldBlock = 7,
  kFieldByref = 8,
  kFieldWeak = 16,
  kByrefCaller = 128,
};

struct Descriptor {
  unsigned long reserved, size;
  void (*copy)(void* to, const void* from);
  void (*dispose)(const void*);
};

struct Block {
  void* isa;
  std::atomic<int> flags;
  int reserved;
  void (*invoke)(void*, ...);
  Descriptor* descriptor;
};

// The box of a __block variable.
struct Byref {
  void* isa;
  Byref* forwarding;
  std::atomic<int> flags;
  int size;
};

struct ByrefHelpers {
  void (*keep)(Byref* to, Byref* from);
  void (*destroy)(Byref*);
};

ByrefHelpers* helpers(Byref* byref) { return reinterpret_cast<ByrefHelpers*>(byref + 1); }

Byref* retain(Byref* stack) {
  Byref* byref = stack->forwarding;
  if (byref->flags & kNeedsFree) {
    byref->flags += kReference;
    return byref;
  }
  auto* heap = static_cast<Byref*>(std::malloc(byref->size));
  std::memcpy(static_cast<void*>(heap), static_cast<void*>(byref), byref->size);
  heap->flags = (byref->flags & ~kReferenceMask) | kNeedsFree | 2 * kReference;  // one for the stack, one for the block
  heap->forwarding = heap;
  byref->forwarding = heap;
  if (heap->flags & kHasCopyDispose) helpers(heap)->keep(heap, byref);
  return heap;
}

void release(Byref* byref) {
  byref = byref->forwarding;
  if (!(byref->flags & kNeedsFree)) return;
  if (((byref->flags -= kReference) & kReferenceMask) != 0) return;
  if (byref->flags & kHasCopyDispose) helpers(byref)->destroy(byref);
  std::free(byref);
}

}  // namespace

extern "C" {

void* _Block_copy(const void* source) {
  auto* block = static_cast<Block*>(const_cast<void*>(source));
  if (!block || block->flags & kIsGlobal) return block;
  if (block->flags & kNeedsFree) {
    block->flags += kReference;
    return block;
  }
  auto* copy = static_cast<Block*>(std::malloc(block->descriptor->size));
  std::memcpy(static_cast<void*>(copy), source, block->descriptor->size);
  copy->isa = _NSConcreteMallocBlock;
  copy->flags = (block->flags & ~kReferenceMask) | kNeedsFree | kReference;
  if (copy->flags & kHasCopyDispose) copy->descriptor->copy(copy, source);
  return copy;
}

void _Block_release(const void* object) {
  auto* block = static_cast<Block*>(const_cast<void*>(object));
  if (!block || !(block->flags & kNeedsFree)) return;
  if (((block->flags -= kReference) & kReferenceMask) != 0) return;
  if (block->flags & kHasCopyDispose) block->descriptor->dispose(block);
  std::free(block);
}

void _Block_object_assign(void* destination, const void* object, const int kind) {
  auto** slot = static_cast<const void**>(destination);
  *slot = object;
  if (kind & kByrefCaller) return;  // inside the box of a __block variable objects are not retained
  if (kind & kFieldByref)
    *slot = retain(static_cast<Byref*>(const_cast<void*>(object)));
  else if ((kind & kFieldBlock) == kFieldBlock)
    *slot = _Block_copy(object);
  else if ((kind & kFieldObject) == kFieldObject)
    objc_retain(static_cast<id>(const_cast<void*>(object)));
}

void _Block_object_dispose(const void* object, const int kind) {
  if (kind & kByrefCaller) return;
  if (kind & kFieldByref)
    release(static_cast<Byref*>(const_cast<void*>(object)));
  else if ((kind & kFieldBlock) == kFieldBlock)
    _Block_release(object);
  else if ((kind & kFieldObject) == kFieldObject)
    objc_release(static_cast<id>(const_cast<void*>(object)));
}
}

namespace {

// What libobjc reads of a class and of the table that introduces it.
struct RawClass {
  void* isa;
  const char* super_name;
  const char* name;
  long version;
  unsigned long info;
  long instance_size;
  void* rest[7];
};

struct SymbolTable {
  unsigned long selector_count;
  void* selectors;
  unsigned short class_count, category_count;
  void* definitions[4];
};

struct Module {
  unsigned long version, size;
  const char* name;
  SymbolTable* symbols;
};

id retain_block(id self, SEL) { return static_cast<id>(_Block_copy(self)); }
id copy_block(id self, SEL, void*) { return static_cast<id>(_Block_copy(self)); }
void release_block(id self, SEL) { _Block_release(self); }
unsigned long retain_count(id, SEL) { return 1; }

__attribute__((constructor)) void make_blocks_objects() {
  static const char* const names[3] = {"__NSStackBlock__", "__NSMallocBlock__", "__NSGlobalBlock__"};
  static void** const storage[3] = {_NSConcreteStackBlock, _NSConcreteMallocBlock, _NSConcreteGlobalBlock};
  static RawClass metaclasses[3];
  static SymbolTable symbols{0, nullptr, 3, 0, {}};
  static Module module{8, sizeof(Module), "blocks", &symbols};
  constexpr unsigned long kClass = 1, kMetaClass = 2;
  for (int i = 0; i < 3; i++) {
    metaclasses[i] = {const_cast<char*>("NSObject"), "NSObject", names[i], 0, kMetaClass, sizeof(RawClass), {}};
    *reinterpret_cast<RawClass*>(storage[i]) = {&metaclasses[i], "NSObject", names[i], 0, kClass, sizeof(Block), {}};
    symbols.definitions[i] = storage[i];
  }
  __objc_exec_class(&module);
  for (void** block_class : storage) {
    auto cls = reinterpret_cast<Class>(block_class);
    class_addMethod(cls, sel_registerName("retain"), reinterpret_cast<IMP>(retain_block), "@16@0:8");
    class_addMethod(cls, sel_registerName("copy"), reinterpret_cast<IMP>(retain_block), "@16@0:8");
    class_addMethod(cls, sel_registerName("copyWithZone:"), reinterpret_cast<IMP>(copy_block), "@24@0:8^v16");
    class_addMethod(cls, sel_registerName("release"), reinterpret_cast<IMP>(release_block), "v16@0:8");
    class_addMethod(cls, sel_registerName("retainCount"), reinterpret_cast<IMP>(retain_count), "Q16@0:8");
  }
}

}  // namespace
