// The IO registry of a machine without an Apple GPU: every look-up finds nothing.
#pragma once
#include <CoreFoundation/CoreFoundation.h>

typedef unsigned int io_object_t;
typedef io_object_t io_iterator_t;
typedef io_object_t io_registry_entry_t;
typedef unsigned int IOOptionBits;
typedef unsigned int mach_port_t;
typedef int kern_return_t;
typedef kern_return_t IOReturn;

enum { KERN_SUCCESS = 0, KERN_FAILURE = 5 };
#define kIOReturnSuccess KERN_SUCCESS
#define kIOMainPortDefault ((mach_port_t)0)
#define kIOMasterPortDefault kIOMainPortDefault
#define IO_OBJECT_NULL ((io_object_t)0)

static inline CFMutableDictionaryRef IOServiceMatching(const char* name) {
  (void)name;
  return 0;
}
static inline kern_return_t IOServiceGetMatchingServices(mach_port_t port,
                                                         CFDictionaryRef matching,
                                                         io_iterator_t* existing) {
  (void)port, (void)matching;
  *existing = IO_OBJECT_NULL;
  return KERN_FAILURE;
}
static inline io_object_t IOIteratorNext(io_iterator_t iterator) {
  (void)iterator;
  return IO_OBJECT_NULL;
}
static inline CFTypeRef IORegistryEntryCreateCFProperty(io_registry_entry_t entry,
                                                        CFStringRef key,
                                                        CFAllocatorRef allocator,
                                                        IOOptionBits options) {
  (void)entry, (void)key, (void)allocator, (void)options;
  return 0;
}
static inline kern_return_t IOObjectRelease(io_object_t object) {
  (void)object;
  return KERN_SUCCESS;
}
