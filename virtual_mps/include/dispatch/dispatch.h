// The part of libdispatch that code which encodes Metal work uses.
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef struct vmps_dispatch_queue* dispatch_queue_t;
typedef struct vmps_dispatch_data* dispatch_data_t;
typedef struct vmps_dispatch_semaphore* dispatch_semaphore_t;
typedef struct vmps_dispatch_queue_attr* dispatch_queue_attr_t;
typedef uint64_t dispatch_time_t;
typedef intptr_t dispatch_once_t;
typedef void (*dispatch_function_t)(void*);

#define DISPATCH_QUEUE_SERIAL ((dispatch_queue_attr_t)0)
#define DISPATCH_QUEUE_CONCURRENT ((dispatch_queue_attr_t)1)
#define DISPATCH_TIME_NOW ((dispatch_time_t)0)
#define DISPATCH_TIME_FOREVER (~(dispatch_time_t)0)
#define DISPATCH_QUEUE_PRIORITY_DEFAULT 0
#define QOS_CLASS_DEFAULT 0x15
#define QOS_CLASS_USER_INITIATED 0x19
#define DISPATCH_DATA_DESTRUCTOR_DEFAULT ((dispatch_block_t)0)

#ifdef __cplusplus
extern "C" {
#endif
dispatch_queue_t dispatch_queue_create(const char* label, dispatch_queue_attr_t attr);
dispatch_queue_t dispatch_get_main_queue(void);
dispatch_queue_t dispatch_get_global_queue(intptr_t identifier, uintptr_t flags);
void dispatch_retain(void* object);
void dispatch_release(void* object);
void dispatch_sync_f(dispatch_queue_t queue, void* context, dispatch_function_t work);
void dispatch_async_f(dispatch_queue_t queue, void* context, dispatch_function_t work);
void dispatch_once_f(dispatch_once_t* predicate, void* context, dispatch_function_t work);
dispatch_semaphore_t dispatch_semaphore_create(intptr_t value);
intptr_t dispatch_semaphore_wait(dispatch_semaphore_t semaphore, dispatch_time_t timeout);
intptr_t dispatch_semaphore_signal(dispatch_semaphore_t semaphore);
dispatch_time_t dispatch_time(dispatch_time_t when, int64_t delta);
size_t dispatch_data_get_size(dispatch_data_t data);
#ifdef __BLOCKS__
typedef void (^dispatch_block_t)(void);
void dispatch_sync(dispatch_queue_t queue, dispatch_block_t block);
void dispatch_async(dispatch_queue_t queue, dispatch_block_t block);
void dispatch_once(dispatch_once_t* predicate, dispatch_block_t block);
dispatch_data_t dispatch_data_create(const void* buffer,
                                     size_t size,
                                     dispatch_queue_t queue,
                                     dispatch_block_t destructor);
#endif
#ifdef __cplusplus
}
#endif
