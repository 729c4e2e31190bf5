// Memory as emulated instructions use it: whole-width accesses, and cp.async with its late arrival.
#include <cstring>

#include "sanitizer.h"
#include "state.h"

namespace cuverify_host {

namespace {

// The sanitizer would find these too, but in the shim's own line.
void ask_sanitizer(const void* address, size_t bytes, const char* verb, Site site) {
    const void* bad = forbidden(address, bytes);
    if (!bad) return;
    Fault fault{"address-sanitizer",
                std::string(verb) + " of " + std::to_string(bytes) + " bytes touches memory that " +
                    "belongs to nothing",
                here(place_of(site))};
    fault.bytes = static_cast<uint32_t>(bytes);
    fault.region = region_part(bad);
    stop(std::move(fault));
}

void touch(const void* address, size_t bytes, unsigned access, const char* verb, Site site) {
    if (!bytes) return;
    ask_sanitizer(address, bytes, verb, site);
    check_access(address, bytes, access, place_of(site));
}

// What a cp.async reads and writes is judged when it is issued and when it is waited for.
void judge_copy(void* destination, size_t bytes, const void* source, size_t source_bytes,
                Site site) {
    touch(source, source_bytes, access_read | access_uncounted, "read", site);
    touch(destination, bytes, access_write | access_uncounted, "write", site);
}

}  // namespace

void read_access(const void* address, size_t bytes, Site site) {
    touch(address, bytes, access_read, "read", site);
}

void read_matrix_row(const void* address, size_t bytes, Site site) {
    touch(address, bytes, access_read | access_matrix, "read", site);
}

void write_access(void* address, size_t bytes, Site site) {
    touch(address, bytes, access_write, "write", site);
}

void atomic_access(void* address, size_t bytes, Site site) {
    // As one write, which is judged as a read, too: a read of its own would be the cell's last one,
    // and a plain read before it, which races with the write, would be forgotten.
    touch(address, bytes, access_write | access_atomic, "atomic access", site);
}

void async_copy(void* destination, const void* source, int bytes, int source_bytes, Site site) {
    if (source_bytes < 0 || source_bytes > bytes)
        fault("bad-cp-async", site, "cp.async copies %d bytes of which %d come from the source",
              bytes, source_bytes);
    auto width = static_cast<size_t>(bytes);
    if (reinterpret_cast<uintptr_t>(destination) % width ||
        (source_bytes && reinterpret_cast<uintptr_t>(source) % width))
        misaligned_access(reinterpret_cast<uintptr_t>(destination) % width ? destination : source,
                          width, place_of(site));
    judge_copy(destination, width, source, static_cast<size_t>(source_bytes), site);
    if (counting)
        count_async(as_on_a_device(destination), source_bytes ? as_on_a_device(source) : 0, width,
                    site);
    memset(destination, 0xff, width);  // what a reader that does not wait would see
    if (checking) mark_pending(destination, width);
    self->async_open.push_back({destination, source, bytes, source_bytes, site});
}

void async_commit() {
    if (counting) begin_leg();
    self->async_groups.push_back(std::move(self->async_open));
    self->async_open.clear();
}

void async_wait(int groups_left) {
    if (counting) begin_leg();
    auto& groups = self->async_groups;
    auto keep = static_cast<size_t>(groups_left);
    if (groups.size() <= keep) return;
    auto arrived = groups.end() - static_cast<ptrdiff_t>(keep);
    for (auto group = groups.begin(); group != arrived; ++group)
        for (const AsyncCopy& copy : *group) {
            auto width = static_cast<size_t>(copy.bytes),
                 given = static_cast<size_t>(copy.source_bytes);
            if (checking) {
                // The copy may have run at any time until now, so what happened meanwhile races with it.
                mark_written(copy.destination, width);
                judge_copy(copy.destination, width, copy.source, given, copy.site);
            }
            memset(copy.destination, 0, width);
            memcpy(copy.destination, copy.source, given);
        }
    groups.erase(groups.begin(), arrived);
}

}  // namespace cuverify_host
