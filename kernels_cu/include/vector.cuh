// 16-byte accesses. Compilers of the host lane would split them; these functions keep them whole, so
// that width and alignment are judged as the device sees them.
#pragma once

#ifdef CUVERIFY_HOST

inline uint4 load128(const void* address, CUVERIFY_SITE) {
    ::cuverify_host::read_access(address, 16, CUVERIFY_GIVEN);
    uint4 value;
    __builtin_memcpy(&value, address, 16);
    return value;
}
inline uint4 load128_nc(const void* address, CUVERIFY_SITE) {
    return load128(address, site_file, site_line);
}
inline void store128(void* address, uint4 value, CUVERIFY_SITE) {
    ::cuverify_host::write_access(address, 16, CUVERIFY_GIVEN);
    __builtin_memcpy(address, &value, 16);
}

#else

__device__ __forceinline__ uint4 load128(const void* address) {
    return *static_cast<const uint4*>(address);
}

// Read once, by one thread, and written by nobody during the launch: past L1, through the read-only path.
__device__ __forceinline__ uint4 load128_nc(const void* address) {
    uint4 value;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(address));
    return value;
}

__device__ __forceinline__ void store128(void* address, uint4 value) {
    *static_cast<uint4*>(address) = value;
}

#endif
