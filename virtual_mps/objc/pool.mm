// A thread that autoreleases without a pool gets one, as on a Mac; GNUstep writes a line to stderr for each object
// instead. PyTorch's backward passes run extensions on threads of its own.
#import <Foundation/Foundation.h>
#include <objc/runtime.h>

extern "C" NSThread* GSCurrentThread(void);

static ptrdiff_t current_pool;  // where an NSThread keeps its innermost pool
static IMP add_object, autorelease;

static void make_sure_of_a_pool() {
  auto* thread = reinterpret_cast<char*>(GSCurrentThread());
  if (!*reinterpret_cast<id*>(thread + current_pool)) [NSAutoreleasePool new];
}

static void add_object_with_pool(id self, SEL selector, id object) {
  make_sure_of_a_pool();
  reinterpret_cast<void (*)(id, SEL, id)>(add_object)(self, selector, object);
}

static id autorelease_with_pool(id self, SEL selector) {
  make_sure_of_a_pool();
  return reinterpret_cast<id (*)(id, SEL)>(autorelease)(self, selector);
}

@interface VMPSPool : NSObject
@end

@implementation VMPSPool
+ (void)load {
  Ivar variables = class_getInstanceVariable([NSThread class], "_autorelease_vars");
  if (!variables) return;  // another GNUstep: its lines on stderr are not worth a failure
  current_pool = ivar_getOffset(variables) + offsetof(struct autorelease_thread_vars, current_pool);
  add_object = class_replaceMethod(object_getClass([NSAutoreleasePool class]), @selector(addObject:),
                                   reinterpret_cast<IMP>(add_object_with_pool), "v24@0:8@16");
  autorelease = class_replaceMethod([NSObject class], @selector(autorelease),
                                    reinterpret_cast<IMP>(autorelease_with_pool), "@16@0:8");
  make_sure_of_a_pool();  // for this thread, whatever of Foundation goes past these methods
}
@end
