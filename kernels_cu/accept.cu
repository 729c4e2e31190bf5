// What of a verified tree is accepted, and the token that comes behind it.
//
//   argmax_partials  the largest logit of each piece of a row
//   argmax_merge     the target's choice behind each node: the place of a row's largest logit
//   accept_greedy    the longest path whose every token is the target's choice
//   accept_sampled   rejection sampling along the tree, and a last token from what is left
//
// Logits. Of equal ones the lowest place is taken, +0 and -0 are equal, a NaN is passed over; where
// nothing stands above -inf, place 0 is taken.
//
// Walks. From the root, children are tried in the order of their links; of children with one token
// the first is taken. A path has at most `path` nodes, root included; a deeper tree is cut there.
// Each node's list of children is followed for at most n links, and a path for at most `path`
// nodes: no input makes a kernel hang. A link that leads out of the tree or round in a circle, and
// an index outside of the request's own n, end the walk at the node that has it.
//
// Outputs. predicts[i] is, for each node of the path, the token behind it, the last one being that
// which the target adds; accept_index lists the path by retrieve_index, accept_token_num counts it
// without the root. Everything else is -1. All of it is written by every launch.
//
// No host reads, no allocation; every buffer is the caller's.

#include "early.cuh"
#include "ranked.cuh"
#include "scan.cuh"
#include "shared.cuh"
#include "vector.cuh"

// bits of a logit: 16 (bfloat16) or 32 (float)
#ifndef LOGIT_BITS
#define LOGIT_BITS 16
#endif
// its type in the contract
#ifndef LOGIT
#define LOGIT __nv_bfloat16
#endif
#ifndef ARGMAX_THREADS
#define ARGMAX_THREADS 256
#endif
// 16-byte loads of a thread that are under way together
#ifndef ARGMAX_UNROLL
#define ARGMAX_UNROLL 5
#endif
// blocks of a multiprocessor, so that those loads have registers
#ifndef ARGMAX_RESIDENT
#define ARGMAX_RESIDENT 4
#endif
#ifndef ACCEPT_THREADS
#define ACCEPT_THREADS 128
#endif
#ifndef SAMPLE_THREADS
#define SAMPLE_THREADS 1024
#endif

namespace {

static_assert(LOGIT_BITS == 16 || LOGIT_BITS == 32, "bfloat16 or float");
static_assert(ARGMAX_THREADS % 32 == 0 && ARGMAX_THREADS <= 1024, "whole warps, one block");
static_assert(ACCEPT_THREADS % 32 == 0 && ACCEPT_THREADS <= 1024, "whole warps, one block");
static_assert(SAMPLE_THREADS % 32 == 0 && SAMPLE_THREADS <= 1024, "whole warps, one block");

constexpr int WALKED = 0;
constexpr int BAD_LINK = 1;   // the links of a node's children lead out of the tree, or in a circle
constexpr int BAD_INDEX = 2;  // retrieve_index of a node is not one of its request
constexpr int NO_MASS = 3;    // no token of the last row has a probability

constexpr int NONE = -1;
constexpr int FAULTY = -2;

constexpr int PIECE = 128 / LOGIT_BITS;  // logits of a 16-byte access

#if LOGIT_BITS == 16
using Bits = unsigned short;
__device__ float logit(Bits bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
__device__ float largest_of(unsigned word) {
    return fmaxf(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u));
}
// The place of a logit in a word of which it is the largest.
__device__ int place_in(unsigned word, float value) {
    return __uint_as_float(word << 16) == value ? 0 : 1;
}
#else
using Bits = float;
__device__ float logit(Bits value) { return value; }
__device__ float largest_of(unsigned word) { return __uint_as_float(word); }
__device__ int place_in(unsigned, float) { return 0; }
#endif

// The links of one request's tree, in shared memory.
struct Tree {
    int n;
    int* child;    // first child, NONE, or FAULTY
    int* sibling;  // next child of the same parent, NONE, or FAULTY
    int* place;    // retrieve_index within the request, or FAULTY

    // Whether a link leads on; what is out of the tree is FAULTY.
    __device__ static int checked(long long link, int n) {
        return link == NONE ? NONE : link < 0 || link >= n ? FAULTY : static_cast<int>(link);
    }

    // Reads what the caller gives; a barrier is owed.
    __device__ void load(int b, const long long* next_token, const long long* next_sibling,
                         const long long* retrieve_index) const {
        const long long first = static_cast<long long>(b) * n;
#pragma unroll 1
        for (int node = static_cast<int>(threadIdx.x); node < n;
             node += static_cast<int>(blockDim.x)) {
            child[node] = checked(next_token[first + node], n);
            sibling[node] = checked(next_sibling[first + node], n);
            const long long index =
                retrieve_index == nullptr ? first + node : retrieve_index[first + node];
            const bool own = index >= first && index < first + n;
            place[node] = own ? static_cast<int>(index - first) : FAULTY;
        }
    }
};

// The path that was walked, in shared memory.
struct Path {
    int length;     // nodes
    int status[2];  // code, node
};

// Writes all outputs of a request. `next[i]` is the token behind the node whose place is i, -1 off
// the path; `nodes` are those of the path.
__device__ void write_path(int b, int n, int path, const Tree& tree, const Path& walked,
                           const int* nodes, const int* next, int* predicts, int* accept_index,
                           int* accept_token_num, int* status) {
    const int thread = static_cast<int>(threadIdx.x);
    const int threads = static_cast<int>(blockDim.x);
#pragma unroll 1
    for (int node = thread; node < n; node += threads) {
        predicts[static_cast<long long>(b) * n + node] = next[node];
    }
#pragma unroll 1
    for (int i = thread; i < path; i += threads) {
        accept_index[static_cast<long long>(b) * path + i] =
            i < walked.length ? b * n + tree.place[nodes[i]] : NONE;
    }
    if (thread == 0) {
        accept_token_num[b] = max(walked.length - 1, 0);
        status[2 * b] = walked.status[0];
        status[2 * b + 1] = walked.status[1];
    }
}

}  // namespace

// The largest logit of each piece of a row, and its place.
//
// Launch: pieces in the grid's x, rows in y.
//
// @kernel argmax_partials
// @param logits     read  LOGIT [rows, vocab] stride=(row_stride, 1)
// @param row_stride value int64                 elements from row to row
// @param rows       value int32
// @param vocab      value int32                 logits of a row
// @param pieces     value int32                 of a row: the grid's x
// @param best       write uint64 [rows, pieces]  value and place as one number; 0: none above -inf
// @block ARGMAX_THREADS
extern "C" __global__ void __launch_bounds__(ARGMAX_THREADS, ARGMAX_RESIDENT)
    argmax_partials(const Bits* __restrict__ logits, long long row_stride, int rows, int vocab,
                    int pieces, unsigned long long* best) {
    constexpr int WARPS = ARGMAX_THREADS / LANES;
    SHARED_ARRAY(unsigned long long, of_warp, [WARPS]);
    early::launch_dependents();
    const int thread = static_cast<int>(threadIdx.x);
    const Bits* row = logits + blockIdx.y * row_stride;
    // what stands in front of the first whole 16 bytes belongs to the first piece, the rest that
    // fills no 16 bytes to the last
    const int head = min(
        static_cast<int>(-reinterpret_cast<unsigned long long>(row) % 16 / sizeof(Bits)), vocab);
    const int vectors = (vocab - head) / PIECE;
    const int each = (vectors + pieces - 1) / pieces;
    const int begin = min(static_cast<int>(blockIdx.x) * each, vectors);
    const int end = min(begin + each, vectors);

    float largest = minus_infinity();
    int at = -1;
    uint4 held = {0, 0, 0, 0};  // what stands there
#pragma unroll 1
    for (int first = begin + thread; first < end; first += ARGMAX_UNROLL * ARGMAX_THREADS) {
        uint4 words[ARGMAX_UNROLL];
#pragma unroll
        for (int i = 0; i < ARGMAX_UNROLL; ++i) {  // the last one again where there are no more
            const int vector = min(first + i * ARGMAX_THREADS, end - 1);
            words[i] = load128_nc(row + head + vector * PIECE);
        }
#pragma unroll
        for (int i = 0; i < ARGMAX_UNROLL; ++i) {
            const float here = fmaxf(fmaxf(largest_of(words[i].x), largest_of(words[i].y)),
                                     fmaxf(largest_of(words[i].z), largest_of(words[i].w)));
            if (here > largest && first + i * ARGMAX_THREADS < end) {
                largest = here;
                at = first + i * ARGMAX_THREADS;
                held = words[i];
            }
        }
    }
    // 16 bytes go by the place of their first logit until it is known which are the best
    unsigned long long key = at < 0 ? 0 : ranked(largest, static_cast<unsigned>(head + at * PIECE));
    auto meet_one = [&](int place) {
        const float value = logit(row[place]);
        const unsigned long long other =
            value > minus_infinity() ? ranked(value, static_cast<unsigned>(place)) : 0;
        if (other > key) {
            key = other;
            at = -1;
        }
    };
    if (blockIdx.x == 0 && thread < head) {
        meet_one(thread);
    }
    if (static_cast<int>(blockIdx.x) == pieces - 1 && head + vectors * PIECE + thread < vocab) {
        meet_one(head + vectors * PIECE + thread);
    }

    const unsigned long long of_own = warp_max(key);
    if (thread % LANES == 0) {
        of_warp[thread / LANES] = of_own;
    }
    __syncthreads();
    const unsigned long long all = warp_max(thread % LANES < WARPS ? of_warp[thread % LANES] : 0);
    // one thread has it, or all have none
    if (key == all && (key != 0 || thread == 0)) {
        if (at >= 0) {
            const unsigned words[4] = {held.x, held.y, held.z, held.w};
            int place = 0;
#pragma unroll
            for (int i = 3; i >= 0; --i) {
                if (largest_of(words[i]) == largest) {
                    place = i * (PIECE / 4) + place_in(words[i], largest);
                }
            }
            key = ranked(largest, static_cast<unsigned>(head + at * PIECE + place));
        }
        best[static_cast<long long>(blockIdx.y) * pieces + blockIdx.x] = key;
    }
}

// The place of the largest logit of each row.
//
// Launch: any number of blocks; a warp takes a row at a time.
//
// @kernel argmax_merge
// @early
// @param best   read  uint64 [rows, pieces]  of argmax_partials
// @param rows   value int32
// @param pieces value int32
// @param target write int64 [rows]
// @block ARGMAX_THREADS
extern "C" __global__ void __launch_bounds__(ARGMAX_THREADS)
    argmax_merge(const unsigned long long* best, int rows, int pieces, long long* target) {
    constexpr int WARPS = ARGMAX_THREADS / LANES;
    early::wait_for_dependency();
    const int lane = static_cast<int>(threadIdx.x) % LANES;
    const int warp = static_cast<int>(threadIdx.x) / LANES;
#pragma unroll 1
    for (int row = static_cast<int>(blockIdx.x) * WARPS + warp; row < rows;
         row += static_cast<int>(gridDim.x) * WARPS) {
        unsigned long long key = 0;
#pragma unroll 1
        for (int piece = lane; piece < pieces; piece += LANES) {
            const unsigned long long other = best[static_cast<long long>(row) * pieces + piece];
            key = other > key ? other : key;
        }
        key = warp_max(key);
        if (lane == 0) {
            target[row] = key == 0 ? 0 : place_of(key);
        }
    }
}

// Greedy acceptance.
//
// Launch: one block a request.
//
// @kernel accept_greedy
// @param candidates       read  int64 [batch, n]     token of each node
// @param retrieve_index?  read  int64 [batch, n]     None: b n + node
// @param next_token       read  int64 [batch, n]     first child, or -1
// @param next_sibling     read  int64 [batch, n]     next child of the same parent, or -1
// @param target           read  int64 [batch, n]     the target's choice, by retrieve_index
// @param batch            value int32                requests
// @param n                value int32                nodes of a request
// @param path             value int32                most nodes of a path
// @param predicts         write int32 [batch, n]     token behind each node of the path
// @param accept_index     write int32 [batch, path]  the path, by retrieve_index
// @param accept_token_num write int32 [batch]        its nodes without the root
// @param status           write int32 [batch, 2]     code, node; -1
// @block ACCEPT_THREADS
// @shared 16 * n + 20 * n + 4 * path + 128
extern "C" __global__ void __launch_bounds__(ACCEPT_THREADS)
    accept_greedy(const long long* __restrict__ candidates,
                  const long long* __restrict__ retrieve_index,
                  const long long* __restrict__ next_token,
                  const long long* __restrict__ next_sibling, const long long* __restrict__ target,
                  int batch, int n, int path, int* predicts, int* accept_index,
                  int* accept_token_num, int* status) {
    DYNAMIC_SHARED(cursor);
    CARVE(cursor, long long, tokens, n);
    CARVE(cursor, long long, choices, n);  // of the target, by place
    CARVE(cursor, int, child, n);
    CARVE(cursor, int, sibling, n);
    CARVE(cursor, int, place, n);
    CARVE(cursor, int, chosen, n);  // the child that has the target's token
    CARVE(cursor, int, next, n);
    CARVE(cursor, int, nodes, path);
    SHARED_ARRAY(Path, walked, [1]);
    const int thread = static_cast<int>(threadIdx.x);
    const int b = static_cast<int>(blockIdx.x);
    const long long first = static_cast<long long>(b) * n;
    const Tree tree = {n, child, sibling, place};

    tree.load(b, next_token, next_sibling, retrieve_index);
#pragma unroll 1
    for (int node = thread; node < n; node += ACCEPT_THREADS) {
        tokens[node] = candidates[first + node];
        choices[node] = target[first + node];
        next[node] = NONE;
    }
    __syncthreads();
#pragma unroll 1
    for (int node = thread; node < n; node += ACCEPT_THREADS) {
        int found = FAULTY;
        if (place[node] >= 0) {
            const long long wanted = choices[place[node]];
            found = child[node];
            int links = 0;
#pragma unroll 1
            while (found >= 0 && tokens[found] != wanted) {
                found = ++links < n ? sibling[found] : FAULTY;
            }
        }
        chosen[node] = found;
    }
    __syncthreads();
    if (thread == 0) {
        Path& all = walked[0];
        all = {0, {WALKED, NONE}};
        int node = 0;
#pragma unroll 1
        while (place[node] >= 0) {
            nodes[all.length++] = node;
            const int found = chosen[node];
            const int to = all.length < path ? found : NONE;
            next[place[node]] = static_cast<int>(choices[place[node]]);
            if (to == FAULTY) {
                all.status[0] = BAD_LINK;
                all.status[1] = node;
            }
            if (to < 0) {
                break;
            }
            node = to;
        }
        if (place[node] < 0) {
            all.status[0] = BAD_INDEX;
            all.status[1] = node;
        }
    }
    __syncthreads();
    write_path(b, n, path, tree, walked[0], nodes, next, predicts, accept_index, accept_token_num,
               status);
}

namespace {

constexpr int EACH = 8;  // probabilities of a lane
constexpr int AHEAD = 2;
constexpr int SEGMENT = LANES * EACH;  // of a warp: neighbours
constexpr int SAMPLE_WARPS = SAMPLE_THREADS / LANES;

// What tokens may still be drawn with.
struct Rest {
    const float* target;
    const float* draft;   // subtracted; or nullptr
    const int* rejected;  // tokens that are out; none where `draft` is given
    int rejections;

    // Weights of the tokens first, first + step, ..., the rejected ones among them. All loads are
    // under way before the first is waited for.
    __device__ void read(float (&weights)[EACH], int first, int step, int vocab) const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int token = first + i * step;
            weights[i] = token < vocab ? target[token] : 0.0f;
        }
        if (draft != nullptr) {
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int token = first + i * step;
                weights[i] -= token < vocab ? draft[token] : 0.0f;
            }
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            weights[i] = weights[i] > 0.0f && weights[i] <= 3.4028235e38f ? weights[i] : 0.0f;
        }
    }
    // Takes out those that were rejected.
    __device__ void reject(float (&weights)[EACH], int first, int step) const {
#pragma unroll 1
        for (int r = 0; r < rejections; ++r) {
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                weights[i] = rejected[r] == first + i * step ? 0.0f : weights[i];
            }
        }
    }
};

// The sum of all weights of a warp, in float64.
__device__ double warp_sum(const float (&weights)[EACH]) {
    double sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        sum += weights[i];
    }
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(ALL_LANES, sum, distance);
    }
    return sum;
}

// The first token at which the sum of weights exceeds `uniform` times the whole; the last one with a
// weight where rounding passes it by; -1 where none has a weight. Sums are in float64. All threads
// of the block call it, and all get the token.
__device__ int draw(const Rest& rest, int vocab, float uniform, double* segments, double* scratch,
                    int* found) {
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % LANES;
    const int warp = thread / LANES;
    const int count = (vocab + SEGMENT - 1) / SEGMENT;
#pragma unroll 1
    for (int begin = warp; begin < count; begin += AHEAD * SAMPLE_WARPS) {
        float weights[AHEAD][EACH];
#pragma unroll
        for (int ahead = 0; ahead < AHEAD; ++ahead) {
            const int segment = begin + ahead * SAMPLE_WARPS;
            rest.read(weights[ahead], segment * SEGMENT + lane, LANES, vocab);
        }
#pragma unroll
        for (int ahead = 0; ahead < AHEAD; ++ahead) {
            const int segment = begin + ahead * SAMPLE_WARPS;
            const double sum = warp_sum(weights[ahead]);
            if (lane == 0 && segment < count) {
                segments[segment] = sum;
            }
        }
    }
    __syncthreads();
    // Segments with rejected tokens are few: each is summed anew, for the first of its tokens.
#pragma unroll 1
    for (int r = warp; r < rest.rejections; r += SAMPLE_WARPS) {
        const int segment = rest.rejected[r] / SEGMENT;
        bool again = rest.rejected[r] < 0;  // a token outside the vocabulary
#pragma unroll 1
        for (int other = 0; other < r; ++other) {
            again |= rest.rejected[other] >= 0 && rest.rejected[other] / SEGMENT == segment;
        }
        if (!again) {
            float weights[EACH];
            rest.read(weights, segment * SEGMENT + lane, LANES, vocab);
            rest.reject(weights, segment * SEGMENT + lane, LANES);
            const double sum = warp_sum(weights);
            if (lane == 0) {
                segments[segment] = sum;
            }
        }
    }
    if (thread == 0) {
        found[0] = count;  // segment
        found[1] = -1;     // the last with a weight
        found[2] = -1;     // token
    }
    __syncthreads();
    double all = 0;
#pragma unroll 1
    for (int begin = 0; begin < count; begin += SAMPLE_THREADS) {
        double sum;
        block::inclusive_sum(begin + thread < count ? segments[begin + thread] : 0.0, scratch, sum);
        all += sum;
    }
    const double wanted = static_cast<double>(uniform) * all;
    double before = 0;
#pragma unroll 1
    for (int begin = 0; begin < count; begin += SAMPLE_THREADS) {
        const int segment = begin + thread;
        const double own = segment < count ? segments[segment] : 0.0;
        double sum;
        const double end = before + block::inclusive_sum(own, scratch, sum);
        if (own > 0 && end > wanted) {
            atomicMin(&found[0], segment);
        }
        if (own > 0) {
            atomicMax(&found[1], segment);
        }
        before += sum;
        if (segment < count) {
            segments[segment] = end - own;
        }
    }
    __syncthreads();
    const bool passed = found[0] == count;
    const int segment = passed ? found[1] : found[0];
    if (segment >= 0 && thread < LANES) {
        float weights[EACH];
        double own = 0;
        const int beginning = segment * SEGMENT + lane * EACH;
        rest.read(weights, beginning, 1, vocab);
        rest.reject(weights, beginning, 1);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            own += weights[i];
        }
        double end = own;
#pragma unroll
        for (int distance = 1; distance < LANES; distance *= 2) {
            const double other = __shfl_up_sync(ALL_LANES, end, distance);
            end += lane >= distance ? other : 0;
        }
        double at = segments[segment] + (end - own);
        int first = vocab;  // beyond the threshold
        int last = -1;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            at += weights[i];
            const int token = beginning + i;
            first = weights[i] > 0 && at > wanted ? min(first, token) : first;
            last = weights[i] > 0 ? token : last;
        }
        first = __reduce_min_sync(ALL_LANES, first);
        last = __reduce_max_sync(ALL_LANES, last);
        if (lane == 0) {
            found[2] = passed || first == vocab ? last : first;
        }
    }
    __syncthreads();
    return found[2];  // written again behind the first barrier of another call
}

}  // namespace

// Acceptance by sampling.
//
// At each node one coin, `uniform` of the node, serves all its children: child by child the target's
// probability of its token is added up.
//
//   with draft_probs     the published rule: a child of positive probability is accepted where the
//                        coin is below the sum over threshold_acc, or where its own probability is
//                        at least threshold_single. A rejected child's probability is put into
//                        draft_probs, and the last token comes from the positive part of
//                        target_probs - draft_probs, or from target_probs where the path has `path`
//                        nodes. Sums in float32.
//   without              the plain rule: a child is accepted where the coin is below the sum, in
//                        float64; a token that a child in front had already is passed over, and the
//                        last token comes from target_probs without the tokens that were rejected.
//                        So a token is what the target alone would have drawn. No thresholds.
//
// Probabilities that are not finite or not positive, and tokens outside the vocabulary, count as 0.
// Where nothing is left to draw from, the last token comes from target_probs; where that has
// nothing, it is 0, and the status says so.
//
// Launch: one block a request.
//
// @kernel accept_sampled
// @param candidates       read   int64 [batch, n]        token of each node
// @param retrieve_index?  read   int64 [batch, n]        None: b n + node
// @param next_token       read   int64 [batch, n]        first child, or -1
// @param next_sibling     read   int64 [batch, n]        next child of the same parent, or -1
// @param uniform          read   fp32 [batch, n]         a coin in [0, 1) for each node
// @param uniform_final    read   fp32 [batch]            and one for the last token
// @param target_probs     read   fp32 [batch, n, vocab]  of the token behind each node
// @param draft_probs?     update fp32 [batch, n, vocab]  zeros on entry; None: the plain rule
// @param threshold_single value  fp32
// @param threshold_acc    value  fp32                    at least 1e-9
// @param batch            value  int32                   requests
// @param n                value  int32                   nodes of a request
// @param vocab            value  int32
// @param path             value  int32                   most nodes of a path
// @param predicts         write  int32 [batch, n]        token behind each node of the path
// @param accept_index     write  int32 [batch, path]     the path, by retrieve_index
// @param accept_token_num write  int32 [batch]           its nodes without the root
// @param status           write  int32 [batch, 2]        code, node; -1
// @block SAMPLE_THREADS
// @shared 36 * n + 4 * path + 8 * ceil_div(vocab, 256) + 176
extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS, 1)
    accept_sampled(const long long* __restrict__ candidates,
                   const long long* __restrict__ retrieve_index,
                   const long long* __restrict__ next_token,
                   const long long* __restrict__ next_sibling, const float* __restrict__ uniform,
                   const float* __restrict__ uniform_final, const float* __restrict__ target_probs,
                   float* draft_probs, float threshold_single, float threshold_acc, int batch,
                   int n, int vocab, int path, int* predicts, int* accept_index,
                   int* accept_token_num, int* status) {
    DYNAMIC_SHARED(cursor);
    CARVE(cursor, double, segments, (vocab + SEGMENT - 1) / SEGMENT);
    CARVE(cursor, int, child, n);
    CARVE(cursor, int, sibling, n);
    CARVE(cursor, int, place, n);
    CARVE(cursor, int, parent, n);
    CARVE(cursor, int, tokens, n);         // -1 outside the vocabulary
    CARVE(cursor, float, probability, n);  // of each node's token behind its parent
    CARVE(cursor, float, coins, n);
    CARVE(cursor, int, next, n);
    CARVE(cursor, int, rejected, n);
    CARVE(cursor, int, nodes, path);
    SHARED_ARRAY(Path, walked, [1]);
    SHARED_ARRAY(int, ended, [2]);  // the last node, how many of its children were rejected
    SHARED_ARRAY(int, found, [3]);
    SHARED_ARRAY(double, scratch, [block::MAX_WARPS]);
    const int thread = static_cast<int>(threadIdx.x);
    const int b = static_cast<int>(blockIdx.x);
    const long long first = static_cast<long long>(b) * n;
    const Tree tree = {n, child, sibling, place};

    tree.load(b, next_token, next_sibling, retrieve_index);
    for (int node = thread; node < n; node += SAMPLE_THREADS) {
        const long long token = candidates[first + node];
        tokens[node] = token < 0 || token >= vocab ? -1 : static_cast<int>(token);
        next[node] = NONE;
        parent[node] = n;
        coins[node] = uniform[first + node];
    }
    __syncthreads();
    // Who is whose child, so that all probabilities are fetched side by side. A node in several
    // lists, as no tree has it, belongs to the lowest.
    for (int node = thread; node < n; node += SAMPLE_THREADS) {
        int at = child[node];
        for (int links = 0; at >= 0 && links < n; ++links) {
            atomicMin(&parent[at], node);
            at = sibling[at];
        }
    }
    __syncthreads();
    for (int node = thread; node < n; node += SAMPLE_THREADS) {
        float p = 0.0f;
        const int above = parent[node];
        if (above < n && place[above] >= 0 && tokens[node] >= 0) {
            p = target_probs[(first + place[above]) * vocab + tokens[node]];
            p = p > 0.0f && p <= 3.4028235e38f ? p : 0.0f;
        }
        probability[node] = p;
    }
    __syncthreads();
    if (thread == 0) {
        Path& all = walked[0];
        all = {0, {WALKED, NONE}};
        int node = 0;
        int rejections = 0;
        while (place[node] >= 0) {
            nodes[all.length++] = node;
            rejections = 0;
            const float coin = coins[node];
            float sum = 0.0f;
            double exact = 0.0;
            int at = all.length < path ? child[node] : NONE;
            for (int links = 0; at >= 0; ++links) {
                const float p = parent[at] == node ? probability[at] : 0.0f;
                bool accepted;
                if (draft_probs != nullptr) {
                    sum += p;
                    accepted = p > 0.0f && (coin < sum / threshold_acc || p >= threshold_single);
                    if (!accepted && tokens[at] >= 0) {
                        draft_probs[(first + place[node]) * vocab + tokens[at]] = p;
                    }
                } else {
                    bool again = false;
                    for (int i = 0; i < rejections; ++i) {
                        again |= rejected[i] == tokens[at];
                    }
                    exact += again ? 0.0f : p;
                    accepted = !again && p > 0.0f && static_cast<double>(coin) < exact;
                    if (!accepted && !again) {
                        rejected[rejections++] = tokens[at];
                    }
                }
                if (accepted) {
                    break;
                }
                at = links + 1 < n ? sibling[at] : FAULTY;
            }
            if (at == FAULTY) {
                all.status[0] = BAD_LINK;
                all.status[1] = node;
            }
            if (at < 0) {
                break;
            }
            next[place[node]] = tokens[at];
            node = at;
        }
        if (place[node] < 0) {
            all.status[0] = BAD_INDEX;
            all.status[1] = node;
        }
        ended[0] = node;
        ended[1] = draft_probs == nullptr ? rejections : 0;
    }
    __syncthreads();
    const int last = ended[0];
    if (place[last] >= 0) {  // the same in all threads
        const long long row = (first + place[last]) * vocab;
        const bool cut = walked[0].length >= path;
        Rest rest = {target_probs + row,
                     draft_probs == nullptr || cut ? nullptr : draft_probs + row, rejected,
                     ended[1]};
        int token = -1;
#pragma unroll 1
        for (int trial = 0; trial < 2 && token < 0; ++trial) {
            token = draw(rest, vocab, uniform_final[b], segments, scratch, found);
            rest.draft = nullptr;  // with nothing left to draw from, all that the target has
            rest.rejections = 0;
        }
        if (thread == 0) {
            next[place[last]] = max(token, 0);
            if (token < 0) {
                walked[0].status[0] = NO_MASS;
                walked[0].status[1] = last;
            }
        }
        __syncthreads();
    }
    write_path(b, n, path, tree, walked[0], nodes, next, predicts, accept_index, accept_token_num,
               status);
}
