// Linked, hidden, into every shared library that is built from .mm files (this package's own one too).
//
// Those files are compiled for clang's gnustep-1.9 runtime, the oldest that has ARC, object subscripting and instance
// variables that stay out of the header. What runs them is GCC's libobjc, because the distribution's Foundation is
// built on it. The layouts are nearly the same; this file adapts the rest before libobjc sees a library's classes.
#include <dlfcn.h>
#include <unwind.h>

#include <cstdlib>
#include <cstring>

namespace {

struct Ivar {
  const char* name;
  const char* type;
  int offset;
};

struct IvarList {
  int count;
  Ivar ivars[];
};

struct Protocol {
  void* isa;  // until libobjc has seen it, a version number
};

struct ProtocolList {
  ProtocolList* next;
  size_t count;
  Protocol* protocols[];
};

// The first thirteen words are GCC's objc_class; the rest is clang's.
struct Class {
  Class* isa;
  const char* super_name;
  const char* name;
  long version;
  unsigned long info;
  long instance_size;
  IvarList* ivars;
  void* methods;
  void* dtable;
  void* subclasses;
  void* sibling;
  ProtocolList* protocols;
  void* gc_object_type;
  long abi_version;
  int** ivar_offsets;  // what compiled code reads, one cell for each instance variable
};

struct Category {
  const char* name;
  const char* class_name;
  void* instance_methods;
  void* class_methods;
  ProtocolList* protocols;
};

struct SymbolTable {
  unsigned long selector_count;
  void* selectors;
  unsigned short class_count;
  unsigned short category_count;
  void* definitions[];
};

struct Module {
  unsigned long version;
  unsigned long size;
  const char* name;
  SymbolTable* symbols;
};

constexpr unsigned long kGccModuleVersion = 8;
constexpr unsigned long kNewAbiFlag = 0x10;  // libobjc reads this bit as "class under construction"
void* const kClangProtocolVersion = reinterpret_cast<void*>(3);
void* const kGccProtocolVersion = reinterpret_cast<void*>(2);

template <class Function>
Function libobjc(const char* name) {
  static void* const library = dlopen("libobjc.so.4", RTLD_LAZY | RTLD_NOLOAD);
  return reinterpret_cast<Function>(dlsym(library, name));
}

void adapt(ProtocolList* list) {
  for (; list; list = list->next)
    for (size_t i = 0; i < list->count; i++)
      if (list->protocols[i]->isa == kClangProtocolVersion) list->protocols[i]->isa = kGccProtocolVersion;
}

long superclass_size(const Class* cls, SymbolTable* symbols);

// Clang gives the instance size relative to the superclass, as a number that is negative or, for a class without
// variables of its own, zero. libobjc wants it absolute.
void lay_out(Class* cls, SymbolTable* symbols) {
  if (cls->instance_size > 0) return;
  const long start = (superclass_size(cls, symbols) + 7) & ~7L;
  cls->instance_size = start - cls->instance_size;
  for (int i = 0; cls->ivars && i < cls->ivars->count; i++) {
    cls->ivars->ivars[i].offset += start;
    *cls->ivar_offsets[i] = cls->ivars->ivars[i].offset;
  }
}

long superclass_size(const Class* cls, SymbolTable* symbols) {
  if (!cls->super_name) return 0;
  for (unsigned i = 0; i < symbols->class_count; i++) {
    auto* other = static_cast<Class*>(symbols->definitions[i]);
    if (std::strcmp(other->name, cls->super_name) == 0) {
      lay_out(other, symbols);
      return other->instance_size;
    }
  }
  void* loaded = libobjc<void* (*)(const char*)>("objc_lookUpClass")(cls->super_name);
  return loaded ? static_cast<long>(libobjc<size_t (*)(void*)>("class_getInstanceSize")(loaded)) : sizeof(void*);
}

}  // namespace

extern "C" __attribute__((visibility("hidden"))) void __objc_exec_class(Module* module) {
  auto* symbols = module->symbols;
  for (unsigned i = 0; i < symbols->class_count; i++) {
    auto* cls = static_cast<Class*>(symbols->definitions[i]);
    lay_out(cls, symbols);
    cls->info &= ~kNewAbiFlag;
    cls->isa->info &= ~kNewAbiFlag;
    adapt(cls->protocols);
  }
  for (unsigned i = 0; i < symbols->category_count; i++)
    adapt(static_cast<Category*>(symbols->definitions[symbols->class_count + i])->protocols);
  module->version = kGccModuleVersion;
  module->size = sizeof(Module);
  libobjc<void (*)(Module*)>("__objc_exec_class")(module);
}

// libobjc has no personality routine of this name. C++'s own one runs the clean-ups and C++ handlers of these frames.
extern "C" _Unwind_Reason_Code __gxx_personality_v0(
    int, _Unwind_Action, _Unwind_Exception_Class, struct _Unwind_Exception*, struct _Unwind_Context*);

extern "C" __attribute__((visibility("hidden"))) _Unwind_Reason_Code
__gnustep_objcxx_personality_v0(int version,
                                _Unwind_Action actions,
                                _Unwind_Exception_Class exception_class,
                                struct _Unwind_Exception* exception,
                                struct _Unwind_Context* context) {
  return __gxx_personality_v0(version, actions, exception_class, exception, context);
}
