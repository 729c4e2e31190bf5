// Shared memory: one arena, laid out anew for every block.
//
// Pieces stand between zones that belong to nobody, so that an index past the end of one array meets
// a fault and not its neighbour. A fresh block finds NaN patterns, as a real one finds old garbage.
#include <cstring>
#include <sys/mman.h>

#include "sanitizer.h"
#include "state.h"

namespace cuverify_host {

namespace {

constexpr size_t arena_bytes =
    2 << 20;  // 227 KiB at most, plus the zones between many small pieces
constexpr size_t zone_bytes = 256;
constexpr int poison = 0xff;  // NaN in every float format

struct Piece {
    const void*
        key;  // a static array's identity; null for a dynamic piece, which `offset` identifies
    size_t offset, bytes;
    char* base;
};
char* arena;
size_t arena_used, arena_dirty, dynamic_limit;
std::vector<Piece> pieces;

void* place(const void* key, size_t offset, size_t bytes, size_t alignment, const char* name,
            Site site) {
    if (alignment < 16) alignment = 16;
    size_t begin = (arena_used + zone_bytes + alignment - 1) & ~(alignment - 1);
    if (begin + bytes + zone_bytes > arena_bytes)
        fault("shared-memory-overflow", site, "%s: %zu bytes more than any device's shared memory",
              name, bytes);
    char* base = arena + begin;
    arena_used = begin + bytes;
    if (arena_used > arena_dirty) {
        char* fresh = arena + arena_dirty;
        allow(fresh, arena_used - arena_dirty);
        memset(fresh, poison, arena_used - arena_dirty);
        forbid(fresh, arena_used - arena_dirty);
        arena_dirty = arena_used;
    }
    allow(base, bytes);
    pieces.push_back({key, offset, bytes, base});
    if (checking || sanitized)
        add_region(base, base - offset, bytes, 0, 0, Contents::uninitialised, true, true, name);
    return base;
}

}  // namespace

void arena_start_launch(size_t dynamic_bytes) {
    if (!arena) {
        void* memory = mmap(nullptr, arena_bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) __builtin_trap();
        arena = static_cast<char*>(memory);
    }
    dynamic_limit = dynamic_bytes;
}

void arena_start_block() {
    allow(arena, arena_dirty);
    memset(arena, poison, arena_dirty);
    forbid(arena, arena_bytes);
    arena_used = 0;
    pieces.clear();
    if (checking || sanitized) forget_shared_regions();
}

void* shared_static(const void* key, size_t bytes, size_t alignment, const char* name, Site site) {
    for (const Piece& piece : pieces)
        if (piece.key == key) return piece.base;
    return place(key, 0, bytes, alignment, name, site);
}

void* shared_dynamic(size_t offset, size_t bytes, size_t alignment, const char* name, Site site) {
    if (offset + bytes > dynamic_limit)
        fault("shared-memory-overflow", site,
              "%s ends at byte %zu of the dynamic shared memory, of which the launch gives %zu",
              name, offset + bytes, dynamic_limit);
    for (const Piece& piece : pieces) {
        if (piece.key) continue;
        if (piece.offset == offset && piece.bytes == bytes) return piece.base;
        if (offset < piece.offset + piece.bytes && piece.offset < offset + bytes)
            fault("shared-memory-overlap", site,
                  "%s, bytes %zu to %zu, overlaps a piece carved at %zu", name, offset,
                  offset + bytes, piece.offset);
    }
    return place(nullptr, offset, bytes, alignment, name, site);
}

}  // namespace cuverify_host
