// Shared memory that both lanes can lay out.
//
//   SHARED_ARRAY(float, tile, [2][32]);        a static array, at most 48 KiB a block in all
//   DYNAMIC_SHARED(cursor);                    the launch's dynamic bytes, given out in pieces:
//   CARVE(cursor, float, scores, rows * 32);   `float* scores`, 16-byte aligned, in order
//
// On the device these are plain __shared__ memory. On the host lane every array and every piece stands
// between zones of its own, so that an index past the end is found and named.
#pragma once

#ifdef CUVERIFY_HOST

#define SHARED_ARRAY(type, name, extents)                                            \
    using name##_array = type extents;                                               \
    static const char name##_key = 0;                                                \
    name##_array& name = *static_cast<name##_array*>(::cuverify_host::shared_static( \
        &name##_key, sizeof(name##_array), alignof(name##_array), #name, CUVERIFY_HERE))
#define DYNAMIC_SHARED(cursor) size_t cursor = 0
#define CARVE(cursor, type, name, count)                                                          \
    type* name = static_cast<type*>(::cuverify_host::shared_dynamic(                              \
        cursor, static_cast<size_t>(count) * sizeof(type), alignof(type), #name, CUVERIFY_HERE)); \
    cursor += (static_cast<size_t>(count) * sizeof(type) + 15) & ~static_cast<size_t>(15)

#else

extern __shared__ __align__(128) unsigned char cuverify_dynamic_shared[];

#define SHARED_ARRAY(type, name, extents) __shared__ __align__(16) type name extents
#define DYNAMIC_SHARED(cursor) unsigned char* cursor = cuverify_dynamic_shared
#define CARVE(cursor, type, name, count)          \
    type* name = reinterpret_cast<type*>(cursor); \
    cursor += (static_cast<size_t>(count) * sizeof(type) + 15) & ~static_cast<size_t>(15)

#endif
