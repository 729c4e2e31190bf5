// What Python calls through ctypes. One launch at a time; the caller holds a lock.
#include <cstdio>
#include <cstring>

#include "state.h"

namespace cuverify_host {
void set_mma_model(unsigned model);

namespace {
void copy_text(char* to, size_t room, const std::string& text) {
    snprintf(to, room, "%s", text.c_str());
}

void view(PlaceView& to, const Actor& actor) {
    copy_text(to.file, sizeof to.file, actor.place.file ? actor.place.file : "");
    to.line = actor.place.line;
    to.pc = actor.place.pc;
    to.block = actor.block;
    to.thread = actor.thread;
}
}  // namespace
}  // namespace cuverify_host

using namespace cuverify_host;

#pragma GCC visibility push(default)
extern "C" {

void* cuverify_use_stacks(void* given) { return use_stacks(given); }

void cuverify_configure(int check, unsigned schedule, uint64_t seed, unsigned mma_model,
                        uint64_t max_accesses) {
    checking = check != 0;
    set_schedule(schedule, seed);
    set_mma_model(mma_model);
    set_access_limit(max_accesses);
}

void cuverify_start_counting(const uint64_t* starts, const uint32_t* statements, uint64_t count) {
    start_counting(starts, statements, count);
}

void cuverify_stop_counting() { counting = false; }

uint32_t cuverify_count_count() { return static_cast<uint32_t>(counted_sites.size()); }

void cuverify_count(uint32_t index, CountView* to) {
    const CountedSite& site = counted_sites[index];
    memset(static_cast<void*>(to), 0, sizeof *to);
    view(to->place, {0, 0, site.place});
    to->operation = static_cast<uint32_t>(site.operation);
    to->shared = site.shared;
    to->counts = site.counts;
}

void cuverify_forget_regions() { forget_all_regions(); }

void cuverify_add_region(void* base, const void* allocation, uint64_t bytes, uint64_t period,
                         uint64_t used, int initialised, int writable, const char* name) {
    add_region(base, allocation, bytes, period, used,
               initialised ? Contents::initialised : Contents::uninitialised, writable != 0, false,
               name);
}

uint32_t cuverify_fault_count() { return static_cast<uint32_t>(faults.size()); }

void cuverify_fault(uint32_t index, FaultView* to) {
    const Fault& fault = faults[index];
    memset(static_cast<void*>(to), 0, sizeof *to);
    copy_text(to->kind, sizeof to->kind, fault.kind);
    copy_text(to->message, sizeof to->message, fault.message);
    view(to->actor, fault.actor);
    to->has_other = fault.other.has_value();
    if (fault.other) view(to->other, *fault.other);
    to->has_region = fault.region.has_value();
    if (fault.region) {
        to->region_shared = fault.region->shared;
        copy_text(to->region, sizeof to->region, fault.region->name);
        to->region_bytes = fault.region->bytes;
        to->offset = fault.region->offset;
    }
    to->bytes = fault.bytes;
}
}
#pragma GCC visibility pop
