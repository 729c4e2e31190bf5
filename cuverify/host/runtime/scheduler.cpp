// Blocks one after another, one fiber a thread, everything on one operating-system thread.
//
// A fiber runs until it meets a barrier or a warp collective, so a schedule is the order in which
// ready fibers are picked. With the random schedule under the checkers a fiber may also be preempted
// before any memory access.
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <iterator>
#include <map>
#include <pthread.h>
#include <sys/mman.h>

#include "sanitizer.h"
#include "state.h"

namespace cuverify_host {

namespace {

constexpr size_t stack_bytes = 256 << 10;
constexpr size_t guard_bytes = 16 << 10;
// Stacks one power of two apart would put the hot top of every stack into the same cache sets.
constexpr size_t stack_colours = 32, colour_bytes = 320;

Context scheduler_context;
void* scheduler_kept;  // with the next two, what the address sanitizer wants to know of this stack
void* scheduler_stack;
size_t scheduler_stack_bytes;
char* stacks;
unsigned ready[max_threads], ready_count;
unsigned waiting_lanes[max_threads / warp_size];   // of each warp, at a collective
unsigned finished_lanes[max_threads / warp_size];  // that have returned
void (*thread_body)(void*);
void* thread_argument;
Schedule schedule;
uint64_t random_state;
int barrier_sum, barrier_result, barrier_threads;
volatile sig_atomic_t interrupted;

uint32_t draw() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return static_cast<uint32_t>(random_state >> 32);
}

char* stack_of(const Fiber& fiber) { return stacks + fiber.index * stack_bytes + guard_bytes; }

void go_to(Fiber* fiber) {
    if (fiber == self) return;
    Fiber* leaving = self;
    self = fiber;
    current = fiber;
    void*& kept = leaving ? leaving->kept : scheduler_kept;
    leave_stack(&kept, fiber ? stack_of(*fiber) : scheduler_stack,
                fiber ? stack_bytes - guard_bytes : scheduler_stack_bytes);
    switch_context(leaving ? leaving->context : scheduler_context,
                   fiber ? fiber->context : scheduler_context);
    reach_stack(kept);
}

void make_ready(Fiber& fiber) {
    fiber.state = State::ready;
    ready[ready_count++] = fiber.index;
}

Fiber* pick() {
    unsigned at = schedule == Schedule::random ? draw() % ready_count : ready_count - 1;
    unsigned index = ready[at];
    ready[at] = ready[--ready_count];
    return &fibers[index];
}

// The ready list is a stack, so the thread that shall run first is pushed last.
unsigned in_push_order(unsigned i, unsigned count) {
    return schedule == Schedule::ascending ? count - 1 - i : i;
}

const char* name_of(Collective kind) {
    switch (kind) {
        case Collective::sync_warp:
            return "__syncwarp";
        case Collective::shuffle:
            return "__shfl_sync";
        case Collective::ballot:
            return "__ballot_sync";
        case Collective::any:
            return "__any_sync";
        case Collective::all:
            return "__all_sync";
        case Collective::match:
            return "__match_sync";
        case Collective::reduce:
            return "__reduce_sync";
        case Collective::mma:
            return "mma";
        case Collective::ldmatrix:
            return "ldmatrix";
        case Collective::movmatrix:
            return "movmatrix";
    }
    return "?";
}

[[noreturn]] void report_deadlock() {
    using Where = std::tuple<State, int, std::string, int>;
    std::map<Where, unsigned> waiting;
    const Fiber* first = nullptr;
    for (unsigned i = 0; i < block.threads; ++i) {
        const Fiber& fiber = fibers[i];
        if (fiber.state != State::at_barrier && fiber.state != State::at_collective) continue;
        if (!first) first = &fiber;
        int kind = fiber.state == State::at_barrier ? -1 : static_cast<int>(fiber.waiting_for);
        ++waiting[{fiber.state, kind, fiber.site.file, fiber.site.line}];
    }
    std::string text = "no thread can go on:";
    for (const auto& [where, count] : waiting) {
        const auto& [state, kind, file, line] = where;
        const char* what =
            state == State::at_barrier ? "__syncthreads" : name_of(static_cast<Collective>(kind));
        text += " " + std::to_string(count) + " wait at " + what + " (" + file + ":" +
                std::to_string(line) + "),";
    }
    text += " " + std::to_string(block.threads - block.live) + " have returned";
    stop({"deadlock", text, {block.linear, first->index, place_of(first->site)}});
}

// Leave the running fiber, which waits or is done, for the next one that can run.
void run_next() {
    if (ready_count) return go_to(pick());
    if (!block.live) return go_to(nullptr);
    report_deadlock();
}

void release_barrier() {
    if (interrupted) leave_launch();
    const Fiber* first = nullptr;
    const Fiber* second = nullptr;
    for (unsigned i = 0; i < block.threads; ++i) {
        Fiber& fiber = fibers[in_push_order(i, block.threads)];
        if (fiber.state != State::at_barrier) continue;
        if (!first) first = &fiber;
        if (fiber.site.line != first->site.line || fiber.site.file != first->site.file)
            second = &fiber;
        make_ready(fiber);
    }
    if (second)
        record({"divergent-barrier",
                "threads of one block meet at different __syncthreads calls",
                {block.linear, first->index, place_of(first->site)},
                Actor{block.linear, second->index, place_of(second->site)}});
    barrier_threads = static_cast<int>(block.at_barrier);
    block.at_barrier = 0;
    barrier_result = barrier_sum;
    barrier_sum = 0;
    ++block.interval;
    if (checking) checker_barrier();
    if (counting) all_lanes_meet();
}

[[noreturn]] void report_skipped(const Fiber& waiter, unsigned lane) {
    char mask[16];
    snprintf(mask, sizeof mask, "%08x", waiter.mask);
    stop({"lane-skips-collective",
          std::string(name_of(waiter.waiting_for)) + " with mask " + mask + " names lane " +
              std::to_string(lane) + ", which has returned without calling it",
          {block.linear, waiter.index, place_of(waiter.site)}});
}

// Whether all lanes that `waiter` names are there; `present` receives them. A lane that waits for
// something else that names the waiter can never come: that ends the launch.
bool complete(const Fiber& waiter, unsigned& present) {
    unsigned base = waiter.warp * warp_size;
    unsigned waiting = waiter.mask & waiting_lanes[waiter.warp];
    unsigned finished = waiter.mask & finished_lanes[waiter.warp];
    bool missing = waiter.mask & ~waiting & ~finished;
    // While somebody is missing, the first lane that waits speaks for those that agreed with it.
    unsigned rest = missing ? (waiting & (0 - waiting)) | finished : waiter.mask;
    present = 0;
    for (; rest; rest &= rest - 1) {
        unsigned lane = static_cast<unsigned>(__builtin_ctz(rest));
        const Fiber& other = fibers[base + lane];
        if (other.state == State::done) {
            // __syncwarp waits only for lanes that still run; a value cannot come from one that does not.
            if (waiter.waiting_for == Collective::sync_warp) continue;
            report_skipped(waiter, lane);
        }
        bool same =
            other.mask == waiter.mask && other.waiting_for == waiter.waiting_for &&
            (other.site.line == waiter.site.line || waiter.waiting_for == Collective::sync_warp);
        if (!same) {
            if (!(other.mask >> waiter.lane & 1)) return false;
            stop({"divergent-collective",
                  "lane " + std::to_string(waiter.lane) + " calls " + name_of(waiter.waiting_for) +
                      " while lane " + std::to_string(lane) + ", which its mask names, waits at " +
                      name_of(other.waiting_for),
                  {block.linear, waiter.index, place_of(waiter.site)},
                  Actor{block.linear, other.index, place_of(other.site)}});
        }
        present |= 1u << lane;
    }
    return !missing;
}

unsigned existing_lanes(unsigned warp) {
    unsigned base = warp * warp_size;
    unsigned count = block.threads - base;
    return count >= warp_size ? ~0u : (1u << count) - 1;
}

void release_collective(const Fiber& waiter, unsigned present) {
    if (checking && waiter.waiting_for == Collective::sync_warp)
        checker_sync_warp(waiter.warp, present);
    if (counting && (present | finished_lanes[waiter.warp]) == existing_lanes(waiter.warp))
        lanes_meet(waiter.warp);
    unsigned base = waiter.warp * warp_size;
    waiting_lanes[waiter.warp] &= ~present;
    for (unsigned i = 0; i < warp_size; ++i) {
        unsigned lane = in_push_order(i, warp_size);
        if (present >> lane & 1) make_ready(fibers[base + lane]);
    }
}

void finish_thread() {
    self->state = State::done;
    finished_lanes[self->warp] |= 1u << self->lane;
    --block.live;
    unsigned base = self->warp * warp_size;
    for (unsigned lane = 0; lane < warp_size && base + lane < block.threads; ++lane) {
        Fiber& waiter = fibers[base + lane];
        if (waiter.state != State::at_collective || !(waiter.mask >> self->lane & 1)) continue;
        unsigned present;
        if (complete(waiter, present)) release_collective(waiter, present);
    }
    if (block.live && block.at_barrier == block.live) release_barrier();
    run_next();
}

void start_thread() {
    reach_stack(nullptr);
    thread_body(thread_argument);
    finish_thread();
    __builtin_unreachable();
}

void start_block(const LaunchConfig& config, unsigned linear) {
    block.linear = linear;
    block.live = block.threads;
    block.at_barrier = 0;
    block.interval = 0;
    ready_count = 0;
    barrier_sum = 0;
    std::fill(std::begin(waiting_lanes), std::end(waiting_lanes), 0u);
    std::fill(std::begin(finished_lanes), std::end(finished_lanes), 0u);
    arena_start_block();
    if (checking) checker_start_block();
    const unsigned* grid = config.grid;
    const unsigned* size = config.block;
    uint3 index{linear % grid[0], linear / grid[0] % grid[1], linear / grid[0] / grid[1]};
    for (unsigned i = 0; i < block.threads; ++i) {
        unsigned thread = in_push_order(i, block.threads);
        Fiber& fiber = fibers[thread];
        fiber.index = thread;
        fiber.thread_idx = {thread % size[0], thread / size[0] % size[1],
                            thread / size[0] / size[1]};
        fiber.block_idx = index;
        fiber.block_dim = dim3(size[0], size[1], size[2]);
        fiber.grid_dim = dim3(grid[0], grid[1], grid[2]);
        fiber.lane = thread % warp_size;
        fiber.warp = thread / warp_size;
        fiber.async_groups.clear();
        fiber.async_open.clear();
        char* bottom = stack_of(fiber);
        char* top = bottom + stack_bytes - guard_bytes - thread % stack_colours * colour_bytes;
        allow(bottom, stack_bytes - guard_bytes);  // the last block's frames may not have ended
        make_context(fiber.context, bottom, top, start_thread);
        make_ready(fiber);
    }
}

void on_interrupt(int) { interrupted = 1; }

void find_own_stack() {
    pthread_attr_t attributes;
    if (pthread_getattr_np(pthread_self(), &attributes)) return;
    pthread_attr_getstack(&attributes, &scheduler_stack, &scheduler_stack_bytes);
    pthread_attr_destroy(&attributes);
}

}  // namespace

Fiber fibers[max_threads];
Fiber* self;
Thread* current;
Block block;

void leave_launch() {
    go_to(nullptr);
    __builtin_unreachable();
}

bool on_a_fiber_stack(const void* address) {
    auto at = static_cast<const char*>(address);
    return at >= stacks && at < stacks + max_threads * stack_bytes;
}

void* use_stacks(void* given) {
    if (given) {
        stacks = static_cast<char*>(given);
        return given;
    }
    void* memory = mmap(nullptr, max_threads * stack_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    stacks = static_cast<char*>(memory);
    // Running off a stack must end in a signal, not in a neighbour's frames.
    for (unsigned i = 0; i < max_threads; ++i)
        mprotect(stacks + i * stack_bytes, guard_bytes, PROT_NONE);
    return stacks;
}

void maybe_preempt() {
    if (schedule != Schedule::random || (draw() & 7)) return;
    make_ready(*self);
    go_to(pick());
}

int block_barrier(Reduction reduction, int predicate, Site site) {
    self->site = site;
    self->state = State::at_barrier;
    barrier_sum += predicate != 0;
    if (++block.at_barrier == block.live) release_barrier();
    run_next();
    switch (reduction) {
        case Reduction::count:
            return barrier_result;
        case Reduction::all:
            return barrier_result == barrier_threads;
        case Reduction::any:
            return barrier_result != 0;
        case Reduction::none:
            break;
    }
    return 0;
}

void collective(unsigned mask, Collective kind, void* slot, Combine combine, Site site) {
    Fiber& me = *self;
    unsigned base = me.warp * warp_size;
    mask &= existing_lanes(me.warp);
    if (!(mask >> me.lane & 1))
        fault("lane-outside-mask", site, "lane %u calls %s with mask %08x, which leaves it out",
              me.lane, name_of(kind), mask);
    me.state = State::at_collective;
    waiting_lanes[me.warp] |= 1u << me.lane;
    me.site = site;
    me.waiting_for = kind;
    me.mask = mask;
    me.slot = slot;
    unsigned present;
    if (!complete(me, present)) return run_next();
    if (combine) {
        void* slots[warp_size] = {};
        for (unsigned lane = 0; lane < warp_size; ++lane)
            if (present >> lane & 1) slots[lane] = fibers[base + lane].slot;
        combine(slots, present, site);
    }
    release_collective(me, present);
    run_next();
}

void sync_warp(unsigned mask, Site site) {
    collective(mask, Collective::sync_warp, nullptr, nullptr, site);
}

int run(const LaunchConfig& config, void (*body)(void*), void* context) {
    clear_faults();
    thread_body = body;
    thread_argument = context;
    self = nullptr;
    interrupted = 0;
    block.threads = config.block[0] * config.block[1] * config.block[2];
    arena_start_launch(config.shared_bytes);
    if (checking) checker_start_launch();
    if (sanitized) find_own_stack();

    // A launch can take seconds and Python's own handler cannot run meanwhile.
    struct sigaction handler = {}, previous = {};
    handler.sa_handler = on_interrupt;
    sigaction(SIGINT, &handler, &previous);
    uint64_t blocks = uint64_t{config.grid[0]} * config.grid[1] * config.grid[2];
    for (uint64_t i = 0; i < blocks && !faulted() && !interrupted; ++i) {
        uint64_t linear = schedule == Schedule::descending ? blocks - 1 - i : i;
        start_block(config, static_cast<unsigned>(linear));
        go_to(pick());
        if (counting) all_lanes_meet();
    }
    sigaction(SIGINT, &previous, nullptr);
    if (checking) checker_end_launch();
    if (interrupted) return 2;
    return faults.empty() ? 0 : 1;
}

void set_schedule(unsigned kind, uint64_t seed) {
    schedule = static_cast<Schedule>(kind);
    random_state = (seed + 1) * 0x9E3779B97F4A7C15ull;
    if (!random_state) random_state = 1;
}

}  // namespace cuverify_host
