// Barriers, fences and warp collectives.
#pragma once

namespace cuverify_host {

constexpr unsigned all_lanes = 0xffffffffu;

template <class T>
struct ShuffleSlot {
    T in, out;
    unsigned source;  // a lane of the warp
};

template <class T>
CUVERIFY_NO_CHECK inline T shuffle(unsigned mask, T value, unsigned source, Site site) {
    static_assert(std::is_trivially_copyable<T>::value, "a shuffle moves plain values");
    ShuffleSlot<T> slot{value, value, source};
    collective(
        mask, Collective::shuffle, &slot,
        [](void** slots, unsigned present, Site where) CUVERIFY_NO_CHECK {
            for (unsigned lane = 0; lane < 32; ++lane) {
                if (!(present >> lane & 1)) continue;
                auto* mine = static_cast<ShuffleSlot<T>*>(slots[lane]);
                if (!(present >> mine->source & 1))
                    fault("shuffle-from-outside-mask", where,
                          "lane %u reads lane %u, which mask %08x leaves out", lane, mine->source,
                          present);
                mine->out = static_cast<ShuffleSlot<T>*>(slots[mine->source])->in;
            }
        },
        site);
    return slot.out;
}

// The source lane within segments of `width` lanes; a source outside the segment means the lane itself.
inline unsigned clamped(unsigned lane, int source, int width) {
    int first = static_cast<int>(lane) & ~(width - 1);
    return source >= first && source < first + width ? static_cast<unsigned>(source) : lane;
}

struct VoteSlot {
    unsigned in, out;
};

CUVERIFY_NO_CHECK inline unsigned vote(unsigned mask, int predicate, Collective kind, Site site) {
    VoteSlot slot{predicate != 0, 0};
    collective(
        mask, kind, &slot,
        [](void** slots, unsigned present, Site) CUVERIFY_NO_CHECK {
            unsigned votes = 0;
            for (unsigned lane = 0; lane < 32; ++lane)
                if (present >> lane & 1) votes |= static_cast<VoteSlot*>(slots[lane])->in << lane;
            for (unsigned lane = 0; lane < 32; ++lane)
                if (present >> lane & 1) static_cast<VoteSlot*>(slots[lane])->out = votes;
        },
        site);
    return slot.out;
}

template <class T>
struct MatchSlot {
    T value;
    unsigned out;
};

template <class T>
CUVERIFY_NO_CHECK inline unsigned match(unsigned mask, T value, Site site) {
    MatchSlot<T> slot{value, 0};
    collective(
        mask, Collective::match, &slot,
        [](void** slots, unsigned present, Site) CUVERIFY_NO_CHECK {
            for (unsigned lane = 0; lane < 32; ++lane)
                for (unsigned other = 0; other < 32; ++other) {
                    if (!(present >> lane & 1) || !(present >> other & 1)) continue;
                    auto* mine = static_cast<MatchSlot<T>*>(slots[lane]);
                    if (mine->value == static_cast<MatchSlot<T>*>(slots[other])->value)
                        mine->out |= 1u << other;
                }
        },
        site);
    return slot.out;
}

template <class T, class Operation>
CUVERIFY_NO_CHECK inline T reduce(unsigned mask, T value, Operation, Site site) {
    T slot = value;
    collective(
        mask, Collective::reduce, &slot,
        [](void** slots, unsigned present, Site) CUVERIFY_NO_CHECK {
            bool first = true;
            T total{};
            for (unsigned lane = 0; lane < 32; ++lane) {
                if (!(present >> lane & 1)) continue;
                T next = *static_cast<T*>(slots[lane]);
                total = first ? next : Operation::apply(total, next);
                first = false;
            }
            for (unsigned lane = 0; lane < 32; ++lane)
                if (present >> lane & 1) *static_cast<T*>(slots[lane]) = total;
        },
        site);
    return slot;
}

struct Add {
    template <class T>
    static T apply(T a, T b) {
        return static_cast<T>(a + b);
    }
};
struct Min {
    template <class T>
    static T apply(T a, T b) {
        return b < a ? b : a;
    }
};
struct Max {
    template <class T>
    static T apply(T a, T b) {
        return a < b ? b : a;
    }
};
struct And {
    template <class T>
    static T apply(T a, T b) {
        return a & b;
    }
};
struct Or {
    template <class T>
    static T apply(T a, T b) {
        return a | b;
    }
};
struct Xor {
    template <class T>
    static T apply(T a, T b) {
        return a ^ b;
    }
};

}  // namespace cuverify_host

inline void __syncthreads(CUVERIFY_SITE) {
    cuverify_host::block_barrier(cuverify_host::Reduction::none, 0, CUVERIFY_GIVEN);
}
inline int __syncthreads_count(int predicate, CUVERIFY_SITE) {
    return cuverify_host::block_barrier(cuverify_host::Reduction::count, predicate, CUVERIFY_GIVEN);
}
inline int __syncthreads_and(int predicate, CUVERIFY_SITE) {
    return cuverify_host::block_barrier(cuverify_host::Reduction::all, predicate, CUVERIFY_GIVEN);
}
inline int __syncthreads_or(int predicate, CUVERIFY_SITE) {
    return cuverify_host::block_barrier(cuverify_host::Reduction::any, predicate, CUVERIFY_GIVEN);
}
inline void __syncwarp(unsigned mask = cuverify_host::all_lanes, CUVERIFY_SITE) {
    cuverify_host::sync_warp(mask, CUVERIFY_GIVEN);
}
inline void __threadfence() { cuverify_host::thread_fence(); }
inline void __threadfence_system() { cuverify_host::thread_fence(); }
inline void __threadfence_block() {}

// The hardware takes the last five bits of a source or distance, whatever it is.
template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, CUVERIFY_SITE) {
    int first = static_cast<int>(cuverify_host::current->lane) & ~(width - 1);
    return cuverify_host::shuffle(
        mask, value, static_cast<unsigned>(first + (source & (width - 1))), CUVERIFY_GIVEN);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int distance, int width = 32, CUVERIFY_SITE) {
    unsigned lane = cuverify_host::current->lane;
    int source = static_cast<int>(lane) ^ (distance & 31);
    // Unlike the others, xor may reach an earlier segment; only later ones are out of its reach.
    int end = (static_cast<int>(lane) & ~(width - 1)) + width;
    return cuverify_host::shuffle(mask, value, source < end ? static_cast<unsigned>(source) : lane,
                                  CUVERIFY_GIVEN);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32,
                          CUVERIFY_SITE) {
    unsigned lane = cuverify_host::current->lane;
    int source = static_cast<int>(lane + (distance & 31));
    return cuverify_host::shuffle(mask, value, cuverify_host::clamped(lane, source, width),
                                  CUVERIFY_GIVEN);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32, CUVERIFY_SITE) {
    unsigned lane = cuverify_host::current->lane;
    int source = static_cast<int>(lane) - static_cast<int>(distance & 31);
    return cuverify_host::shuffle(mask, value, cuverify_host::clamped(lane, source, width),
                                  CUVERIFY_GIVEN);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, CUVERIFY_SITE) {
    return cuverify_host::vote(mask, predicate, cuverify_host::Collective::ballot, CUVERIFY_GIVEN);
}
inline int __any_sync(unsigned mask, int predicate, CUVERIFY_SITE) {
    return cuverify_host::vote(mask, predicate, cuverify_host::Collective::any, CUVERIFY_GIVEN) !=
           0;
}
inline int __all_sync(unsigned mask, int predicate, CUVERIFY_SITE) {
    return cuverify_host::vote(mask, !predicate, cuverify_host::Collective::all, CUVERIFY_GIVEN) ==
           0;
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value, CUVERIFY_SITE) {
    return cuverify_host::match(mask, value, CUVERIFY_GIVEN);
}
#define CUVERIFY_REDUCE(name, operation)                                                       \
    template <class T>                                                                         \
    inline T name(unsigned mask, T value, CUVERIFY_SITE) {                                     \
        return cuverify_host::reduce(mask, value, cuverify_host::operation{}, CUVERIFY_GIVEN); \
    }
CUVERIFY_REDUCE(__reduce_add_sync, Add)
CUVERIFY_REDUCE(__reduce_min_sync, Min)
CUVERIFY_REDUCE(__reduce_max_sync, Max)
CUVERIFY_REDUCE(__reduce_and_sync, And)
CUVERIFY_REDUCE(__reduce_or_sync, Or)
CUVERIFY_REDUCE(__reduce_xor_sync, Xor)
#undef CUVERIFY_REDUCE
