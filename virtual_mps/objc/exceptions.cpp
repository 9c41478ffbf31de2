// Objective-C exceptions as C++ exceptions, so that both unwind through the same frames: those of extensions, of
// PyTorch and of Python's bindings, which turn what nobody caught into a RuntimeError. libobjc's own would end the
// process there.
//
// This library comes before libobjc in the search for objc_exception_throw, for Foundation too. The two type_info
// classes have the names and virtual functions that clang's gnustep runtimes expect of the catch clauses they emit.
#include <objc/message.h>
#include <objc/objc.h>
#include <objc/runtime.h>

#include <stdexcept>
#include <string>
#include <typeinfo>

namespace {

id send(id object, const char* name) {
  SEL sel = sel_registerName(name);
  return reinterpret_cast<id (*)(id, SEL)>(objc_msg_lookup(object, sel))(object, sel);
}

bool responds(id object, const char* name) {
  return class_respondsToSelector(object_getClass(object), sel_registerName(name));
}

std::string text(id string) {
  return string ? reinterpret_cast<const char*>(send(string, "UTF8String")) : "no reason given";
}

std::string describe(id object) {
  if (!object || !responds(object, "reason")) return "an Objective-C object was thrown";
  return text(send(object, "name")) + ": " + text(send(object, "reason"));
}

struct ThrownObject : std::runtime_error {
  id object;
  explicit ThrownObject(id thrown) : std::runtime_error(describe(thrown)), object(thrown) {}
};

bool is_kind_of(id object, const char* class_name) {
  for (Class cls = object_getClass(object); cls; cls = class_getSuperclass(cls))
    if (std::string(class_getName(cls)) == class_name) return true;
  return false;
}

id object_of(const std::type_info* thrown_type, void* thrown) {
  return *thrown_type == typeid(ThrownObject) ? static_cast<ThrownObject*>(thrown)->object : nullptr;
}

}  // namespace

namespace gnustep::libobjc {

struct __objc_id_type_info : std::type_info {
  __objc_id_type_info() : type_info("id") {}
  bool __do_catch(const std::type_info* thrown_type, void** thrown, unsigned) const override;
};

struct __objc_class_type_info : std::type_info {
  using std::type_info::type_info;
  ~__objc_class_type_info() override;
  bool __do_catch(const std::type_info* thrown_type, void** thrown, unsigned) const override;
};

__objc_class_type_info::~__objc_class_type_info() = default;

bool __objc_id_type_info::__do_catch(const std::type_info* thrown_type, void** thrown, unsigned) const {
  id object = object_of(thrown_type, *thrown);
  if (object) *thrown = object;
  return object;
}

// Clang names the type_info of a class after the class.
bool __objc_class_type_info::__do_catch(const std::type_info* thrown_type, void** thrown, unsigned) const {
  id object = object_of(thrown_type, *thrown);
  if (!object || !is_kind_of(object, name())) return false;
  *thrown = object;
  return true;
}

}  // namespace gnustep::libobjc

extern "C" {
gnustep::libobjc::__objc_id_type_info __objc_id_type_info;

void objc_exception_throw(id object) { throw ThrownObject(object); }
}
