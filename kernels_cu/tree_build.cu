// Draft trees, made and linked on the device: what a verify step needs to know of them, in the forms
// of the verifier and of SGLang.
//
//   tree_build       grows the best-first tree of DDTree (Ringel and Romano, arXiv 2604.12989) from
//                    log-probabilities of the k best tokens of each depth
//   tree_links       the same views of any tree, from its parents
//   tree_mask        SGLang's tree mask in its three modes, from visibility words
//   eagle_parents    parents from EAGLE's selected_index and parent_list
//   visible_parents  parents from visibility words, as n-gram drafters give them by a mask
//
// A request has n nodes. Node 0 is its root, and a parent stands in front of its children. A tree
// may have fewer nodes (`size`): those behind them belong to no path. They have the root's token,
// parent -1, rank -1, depth 0, the root's position and no links, and see the root and themselves.
//
// The best-first tree. The mass of a node is the sum of log-probabilities along its path, in
// float64: a first child adds its own to its parent's, a sibling subtracts that of the sibling in
// front and adds its own. Taken is, again and again, the node of most mass that is the first child
// of one that is taken, or its next sibling; of equal masses that whose path of ranks comes first
// in lexicographic order. A row of log-probabilities ends in front of its first NaN or infinity; one
// above 0 counts as 0. Tokens are copied, whatever they are, repeated ones too.
//
// How. One warp grows the tree: a chain of siblings has one candidate at a time, so candidates are
// as many as nodes, and lane l keeps those of parents l, l + 32, ...: all of them in registers where
// they are few, else the best one, the others in shared memory. While the warp finds the largest
// mass, each lane works out what would follow its own best candidate. Then all warps write. Kept is
// what a path has lost, the mass with its sign changed: never below 0, so that its bits as a whole
// number are in its order; infinite where there is no candidate.
//
// Loops that a small tree runs once or twice are not unrolled: in a step all of the text is read from
// memory once, and that takes longer than it saves.
//
// What is wrong with a request is said in its status, and its tree is the root alone. All outputs
// are written completely by every launch; no host reads, no allocation; every buffer is the caller's.

#include "scan.cuh"
#include "shared.cuh"
#include "vector.cuh"

// the types of token_ids and seq_lens: int or long long
#ifndef TOKEN_INDEX
#define TOKEN_INDEX long long
#endif
#ifndef SEQ_INDEX
#define SEQ_INDEX int
#endif
// candidates that a lane has in registers: n is at most 32 SLOTS + 1, if they are not in
// shared memory
#ifndef SLOTS
#define SLOTS 2
#endif
#ifndef IN_SHARED
#define IN_SHARED 0
#endif
#ifndef TREE_THREADS
#define TREE_THREADS 128
#endif

namespace {

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int LANES = 32;
constexpr int MAX_NODES = 1024;
constexpr int MAX_DEPTH = 32;
constexpr int MAX_RANKS = 64;

static_assert(TREE_THREADS % 32 == 0 && TREE_THREADS <= 1024, "whole warps, one block");
static_assert(SLOTS >= 1 && SLOTS * LANES <= MAX_NODES, "a node's number has ten bits");

constexpr int BUILT = 0;
constexpr int NOT_FINITE = 1;     // a log-probability is NaN or +inf; the tree stands without it
constexpr int NO_ROOT = 2;        // parents[0] is not -1
constexpr int SECOND_ROOT = 3;    // another node has parent -1
constexpr int BAD_PARENT = 4;     // a parent is no node
constexpr int PARENT_BEHIND = 5;  // a parent does not stand in front of its child, as in a cycle
constexpr int BAD_SIZE = 6;       // sizes[b] is below 1 or above n
constexpr int CODES = 8;
constexpr unsigned NO_FAULT = 0xffffffffu;

constexpr int NOT_FOUND = -2;  // a parent that there is none of

// of a prefix that a full mask has columns for: all offsets into it fit 64 bits then
constexpr long long MAX_LENGTH = 0x7fffffff;

// A node or a candidate, in two words: its parent and the sibling in front of it, and where in the
// table of scores its own score stands and the first of the next depth. In that table the row of a
// depth has k scores and one that ends it, so that places tell depth and rank.
struct Node {
    unsigned family;
    unsigned place;

    __device__ static Node of(int parent, int sibling, int at, int next) {
        return {static_cast<unsigned>(parent) | static_cast<unsigned>(sibling) << 16,
                static_cast<unsigned>(at) | static_cast<unsigned>(next) << 16};
    }
    __device__ int parent() const { return static_cast<int>(family & 0xffffu); }
    __device__ int sibling() const { return static_cast<int>(family >> 16); }
    __device__ int at() const { return static_cast<int>(place & 0xffffu); }
    __device__ int next() const { return static_cast<int>(place >> 16); }
};

// Whether a candidate's path of ranks comes before another's.
__device__ bool precedes(const Node* nodes, Node a, Node b) {
    while (a.next() > b.next()) {
        a = nodes[a.parent()];
    }
    while (b.next() > a.next()) {
        b = nodes[b.parent()];
    }
    while (a.parent() != b.parent()) {
        a = nodes[a.parent()];
        b = nodes[b.parent()];
    }
    return a.at() < b.at();
}

__device__ float minus_infinity() { return __uint_as_float(0xff800000u); }

constexpr unsigned TWINS = 0x80000000u;               // a bit that no family has
constexpr long long INFINITE = 0x7ff0000000000000ll;  // bits of what no candidate has lost

// What follows a candidate that has lost `least`.
struct Followers {
    double sibling, child;

    __device__ Followers(const double* scores, long long least, Node own) {
        const double loss = __longlong_as_double(least);
        sibling = loss + scores[own.at()] - scores[own.at() + 1];
        child = loss - scores[own.next()];
    }
};

// The smallest of the numbers of a warp's lanes whose high words, `lowest`, are equal.
__device__ long long least_of(long long lost, int lowest) {
    const unsigned low = static_cast<int>(lost >> 32) == lowest ? static_cast<unsigned>(lost) : ~0u;
    return static_cast<long long>(lowest) << 32 | __reduce_min_sync(ALL_LANES, low);
}

// Of a warp's lanes that have a candidate (`winner` is their own number, else LANES), the one whose
// path of ranks comes first, and its candidate.
__device__ void settle(const Node* nodes, Node& taken, int& winner) {
#pragma unroll 1
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        const Node other = {__shfl_xor_sync(ALL_LANES, taken.family, distance),
                            __shfl_xor_sync(ALL_LANES, taken.place, distance)};
        const int owner = __shfl_xor_sync(ALL_LANES, winner, distance);
        if (owner < LANES && owner != winner &&
            (winner == LANES || precedes(nodes, other, taken))) {
            taken = other;
            winner = owner;
        }
    }
}

#if !IN_SHARED

// Grows a tree in one warp; returns its nodes. `scores` has `depth` rows of `stride`, none above 0,
// the last of each row and two behind all rows -inf. `nodes` has room for n.
__device__ int grow(const double* scores, int depth, int stride, int n, Node* nodes) {
    const int lane = static_cast<int>(threadIdx.x) % LANES;
    const int behind = depth * stride;  // all rows
    long long lost[SLOTS];
    Node candidates[SLOTS];
#pragma unroll
    for (int j = 0; j < SLOTS; ++j) {
        lost[j] = INFINITE;
        candidates[j] = Node::of(0, 0, behind, behind);
    }
    if (lane == 0) {
        lost[0] = __double_as_longlong(0.0 - scores[0]);
        candidates[0] = Node::of(0, 0, 0, stride);
        nodes[0] = {0, 0};
    }
    int size = 1;
    for (; size < n; ++size) {
        long long least = lost[0];
        Node own = candidates[0];
#pragma unroll
        for (int j = 1; j < SLOTS; ++j) {
            const bool less = lost[j] < least;
            least = less ? lost[j] : least;
            own.family = less ? candidates[j].family : own.family;
            own.place = less ? candidates[j].place : own.place;
        }
        const int high = static_cast<int>(least >> 32);
        const int lowest = __reduce_min_sync(ALL_LANES, high);
        Followers followers(scores, least, own);
        int equals = 0;
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) {
            equals += static_cast<int>(lost[j] >> 32) == high;
        }
        // beside its family, whether a lane has several that are equal so far
        const unsigned told = own.family | (equals > 1 ? TWINS : 0u);
        const unsigned tied = __ballot_sync(ALL_LANES, high == lowest);
        int winner = LANES - 1 - __clz(static_cast<int>(tied));
        Node taken = {__shfl_sync(ALL_LANES, told, winner),
                      __shfl_sync(ALL_LANES, own.place, winner)};
        long long below = __shfl_sync(ALL_LANES, __double_as_longlong(followers.child), winner);
        if ((tied & (tied - 1)) != 0 || (taken.family & TWINS) != 0) {
            if (lowest == static_cast<int>(INFINITE >> 32)) {
                break;
            }
            const long long best = least_of(least, lowest);
            __syncwarp();  // the nodes that lane 0 has written
            bool has = false;
#pragma unroll
            for (int j = 0; j < SLOTS; ++j) {
                if (lost[j] == best && (!has || precedes(nodes, candidates[j], own))) {
                    has = true;
                    own = candidates[j];
                }
            }
            followers = Followers(scores, least, own);
            taken = own;
            winner = has ? lane : LANES;
            settle(nodes, taken, winner);
            below = __shfl_sync(ALL_LANES, __double_as_longlong(followers.child), winner);
        }
        if (lane == 0) {
            nodes[size] = taken;
        }
        // What is behind the last rank or depth has lost everything; its place stays in the table.
        const Node under = Node::of(size, 0, taken.next(), min(taken.next() + stride, behind));
        // The winner is the lane of the parent: it has looked its sibling up itself.
#pragma unroll
        for (int j = 0; j < SLOTS; ++j) {
            const int slot = j * LANES + lane;
            if (lane == winner && slot == own.parent()) {
                lost[j] = __double_as_longlong(followers.sibling);
                candidates[j] = {static_cast<unsigned>(slot) | static_cast<unsigned>(size) << 16,
                                 taken.place + 1};
            }
            if (slot == size) {
                lost[j] = below;
                candidates[j] = under;
            }
        }
    }
    return size;
}

#else

// As above, with the candidates in shared memory: `lost` and `candidates` have LANES places for each
// lane, those of lane l from l LANES on; lane j alone reads and writes the j-th of them. A lane knows
// the best of its own. A step changes two of them: the lane of the parent finds its best anew, all
// lanes helping; that of the new node's first child compares it with what it has.
__device__ int grow(const double* scores, int depth, int stride, int n, Node* nodes,
                    long long* lost, Node* candidates) {
    const int lane = static_cast<int>(threadIdx.x) % LANES;
    const int behind = depth * stride;  // all rows
    long long least = lane == 0 ? __double_as_longlong(0.0 - scores[0]) : INFINITE;
    Node own = lane == 0 ? Node::of(0, 0, 0, stride) : Node::of(0, 0, behind, behind);
    if (lane == 0) {
        nodes[0] = {0, 0};
    }
#pragma unroll 1
    for (int at = lane; at < LANES * LANES; at += LANES) {
        lost[at] = INFINITE;
        candidates[at] = Node::of(0, 0, behind, behind);
    }
    // The lane that has the least, by its path where several have it, and LANES where none has a
    // candidate; all lanes get the same one.
    const auto first_lane = [&](long long here, Node candidate) {
        const int high = static_cast<int>(here >> 32);
        const int lowest = __reduce_min_sync(ALL_LANES, high);
        const unsigned tied = __ballot_sync(ALL_LANES, high == lowest);
        int winner = __ffs(static_cast<int>(tied)) - 1;
        if (lowest == static_cast<int>(INFINITE >> 32)) {
            winner = LANES;
        } else if ((tied & (tied - 1)) != 0) {
            const long long best = least_of(here, lowest);
            winner = here == best ? lane : LANES;
            settle(nodes, candidate, winner);
        }
        return winner;
    };
    int size = 1;
#pragma unroll 1
    for (; size < n; ++size) {
        const Followers followers(scores, least, own);
        const int winner = first_lane(least, own);
        if (winner == LANES) {
            break;
        }
        const Node taken = {__shfl_sync(ALL_LANES, own.family, winner),
                            __shfl_sync(ALL_LANES, own.place, winner)};
        const long long beside =
            __shfl_sync(ALL_LANES, __double_as_longlong(followers.sibling), winner);
        const long long below =
            __shfl_sync(ALL_LANES, __double_as_longlong(followers.child), winner);
        // What is behind the last rank or depth has lost everything; its place stays in the table.
        const int parent = taken.parent();
        const Node next = {static_cast<unsigned>(parent) | static_cast<unsigned>(size) << 16,
                           taken.place + 1};
        const Node under = Node::of(size, 0, taken.next(), min(taken.next() + stride, behind));
        const int owner = size % LANES;
        // The candidates of the winner, one for each lane that helps; two of them are new.
        long long here = lost[winner * LANES + lane];
        Node candidate = candidates[winner * LANES + lane];
        const bool is_next = lane == parent / LANES;
        const bool is_under = winner == owner && lane == size / LANES;
        here = is_next ? beside : is_under ? below : here;
        candidate.family = is_next ? next.family : is_under ? under.family : candidate.family;
        candidate.place = is_next ? next.place : is_under ? under.place : candidate.place;
        if (lane == 0) {
            nodes[size] = taken;
        }
        if (is_next) {
            lost[winner * LANES + lane] = beside;
            candidates[winner * LANES + lane] = next;
        }
        if (lane == size / LANES) {
            lost[owner * LANES + lane] = below;
            candidates[owner * LANES + lane] = under;
        }
        __syncwarp();
        const int best = first_lane(here, candidate) % LANES;
        here = __shfl_sync(ALL_LANES, here, best);
        candidate = {__shfl_sync(ALL_LANES, candidate.family, best),
                     __shfl_sync(ALL_LANES, candidate.place, best)};
        bool better = lane == owner && lane != winner && below < least;
        if (lane == owner && lane != winner && below == least && below != INFINITE) {
            better = precedes(nodes, under, own);
        }
        least = better ? below : lane == winner ? here : least;
        own.family = better ? under.family : lane == winner ? candidate.family : own.family;
        own.place = better ? under.place : lane == winner ? candidate.place : own.place;
    }
    return size;
}

#endif

// What all trees are written as.
struct Views {
    int* depths;
    long long* positions;
    long long* retrieve_index;
    long long* next_token;
    long long* next_sibling;
    unsigned long long* visible;
};

// Writes the views of request b, whose first `size` nodes have the parents that `parent(node)`
// gives. Ancestors stand in front, so that a climb meets the words of a row from the last to the
// first.
template <class Parent>
__device__ void write_views(const Views& to, int b, int n, int words, int size, long long seq_len,
                            const int* first_child, const int* next_sibling, const Parent& parent) {
    const long long first = static_cast<long long>(b) * n;
#pragma unroll 1
    for (int node = static_cast<int>(threadIdx.x); node < n; node += TREE_THREADS) {
        const bool used = node < size;
        unsigned long long* row = to.visible + (first + node) * words;
#pragma unroll 1
        for (int w = words - 1; w > node / 64; --w) {
            row[w] = 0;
        }
        int word = node / 64;
        unsigned long long bits = 1ull << node % 64;
        int depth = 0;
#pragma unroll 1
        for (int at = node; at > 0;) {
            at = used ? parent(at) : 0;
            depth += used ? 1 : 0;
#pragma unroll 1
            for (; word > at / 64; --word) {
                row[word] = bits;
                bits = 0;
            }
            bits |= 1ull << at % 64;
        }
        row[0] = bits;
        const long long i = first + node;
        to.depths[i] = depth;
        to.positions[i] = static_cast<long long>(static_cast<unsigned long long>(seq_len) + depth);
        to.retrieve_index[i] = i;
        to.next_token[i] = used ? first_child[node] : -1;
        to.next_sibling[i] = used ? next_sibling[node] : -1;
    }
}

// Links the children of all nodes in ascending order, in one warp: 32 nodes at a time from the last
// to the first, those of one parent among them in front of its children behind.
__device__ void link_children(const int* parents, int size, int* first_child, int* next_sibling) {
    const int lane = static_cast<int>(threadIdx.x) % LANES;
#pragma unroll 1
    for (int begin = (size - 1) / LANES * LANES; begin >= 0; begin -= LANES) {
        const int node = begin + lane;
        const bool child = node > 0 && node < size;
        const int parent = child ? parents[node] : -1;
        const unsigned same = __match_any_sync(ALL_LANES, parent);
        const unsigned behind = lane == LANES - 1 ? 0u : same >> (lane + 1);
        if (child) {
            next_sibling[node] =
                behind != 0 ? node + __ffs(static_cast<int>(behind)) : first_child[parent];
        }
        __syncwarp();
        if (child && (same & ((1u << lane) - 1)) == 0) {
            first_child[parent] = node;
        }
        __syncwarp();
    }
}

__device__ void write_status(int* status, int b, unsigned fault) {
    status[2 * b] = fault == NO_FAULT ? BUILT : static_cast<int>(fault % CODES);
    status[2 * b + 1] = fault == NO_FAULT ? -1 : static_cast<int>(fault / CODES);
}

}  // namespace

// Grows one tree a request.
//
// Launch: one block a request.
//
// @kernel tree_build
// @param logprobs       read  fp32 [batch, depth, k]         descending in each row
// @param token_ids      read  TOKEN_INDEX [batch, depth, k]  their tokens
// @param root_tokens    read  int64 [batch]                  token of each root
// @param seq_lens       read  SEQ_INDEX [batch]              tokens in front of each root
// @param batch          value int32                          requests
// @param depth          value int32                          up to 32
// @param k              value int32                          up to 64
// @param n              value int32                          nodes of a request, the root included
// @param words          value int32                          visibility words of a node
// @param tokens         write int64 [batch, n]               token of each node
// @param parents        write int32 [batch, n]               -1 for the root
// @param ranks          write int32 [batch, n]               -1 for the root
// @param depths         write int32 [batch, n]
// @param positions      write int64 [batch, n]               seq_lens + depth
// @param retrieve_index write int64 [batch, n]               b n + node
// @param next_token     write int64 [batch, n]               first child, or -1
// @param next_sibling   write int64 [batch, n]               next node of the same parent, or -1
// @param visible        write uint64 [batch, n, words]       bit k of word w: node 64 w + k is seen
// @param sizes          write int32 [batch]                  nodes of each tree
// @param status         write int32 [batch, 2]               code; depth x k + rank at fault, or -1
// @block TREE_THREADS
// @shared 16 * depth * (k + 1) + 16 * n + 16384 * IN_SHARED + 128
extern "C" __global__ void __launch_bounds__(TREE_THREADS, 1)
    tree_build(const float* __restrict__ logprobs, const TOKEN_INDEX* __restrict__ token_ids,
               const long long* __restrict__ root_tokens, const SEQ_INDEX* __restrict__ seq_lens,
               int batch, int depth, int k, int n, int words, long long* tokens, int* parents,
               int* ranks, int* depths, long long* positions, long long* retrieve_index,
               long long* next_token, long long* next_sibling, unsigned long long* visible,
               int* sizes, int* status) {
    DYNAMIC_SHARED(cursor);
    const int stride = k + 1;
    const int places = depth * stride;
    CARVE(cursor, double, scores, places + 2);
    CARVE(cursor, long long, ids, places);
    CARVE(cursor, Node, nodes, n);
#if IN_SHARED
    CARVE(cursor, long long, lost, LANES* LANES);
    CARVE(cursor, Node, candidates, LANES * LANES);
#endif
    CARVE(cursor, int, children, n);
    CARVE(cursor, int, siblings, n);
    SHARED_ARRAY(unsigned, fault, [1]);
    SHARED_ARRAY(int, grown, [1]);
    constexpr int UNROLL = 4;
    const int thread = static_cast<int>(threadIdx.x);
    const int b = static_cast<int>(blockIdx.x);
    const int table = depth * k;
    const long long from = static_cast<long long>(b) * table;
    const long long seq_len = static_cast<long long>(seq_lens[b]);
    const long long root = root_tokens[b];

    if (thread == 0) {
        fault[0] = NO_FAULT;
    }
#pragma unroll 1
    for (int level = thread; level < depth + 2; level += TREE_THREADS) {
        scores[level < depth ? level * stride + k : places + level - depth] = minus_infinity();
    }
#pragma unroll 1
    for (int node = thread; node < n; node += TREE_THREADS) {
        children[node] = siblings[node] = -1;
    }
    // All loads of a thread are under way before the first is waited for.
    unsigned own_fault = NO_FAULT;
#pragma unroll 1
    for (int first = thread; first < table; first += UNROLL * TREE_THREADS) {
        float score[UNROLL];
        long long id[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const int at = min(first + i * TREE_THREADS, table - 1);
            score[i] = logprobs[from + at];
            id[i] = static_cast<long long>(token_ids[from + at]);
        }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const int at = first + i * TREE_THREADS;
            if (at < table) {
                const bool known = score[i] < -minus_infinity();
                scores[at + at / k] = known ? min(score[i], 0.0f) : minus_infinity();
                ids[at + at / k] = id[i];
                if (!known) {
                    own_fault = min(own_fault, static_cast<unsigned>(at * CODES + NOT_FINITE));
                }
            }
        }
    }
    __syncthreads();
    if (own_fault != NO_FAULT) {
        atomicMin(&fault[0], own_fault);
    }
    if (thread < LANES) {
#if IN_SHARED
        const int size = grow(scores, depth, stride, n, nodes, lost, candidates);
#else
        const int size = grow(scores, depth, stride, n, nodes);
#endif
        if (thread == 0) {
            grown[0] = size;
        }
    }
    __syncthreads();

    const int size = grown[0];
#pragma unroll 1
    for (int node = thread; node < n; node += TREE_THREADS) {
        const long long i = static_cast<long long>(b) * n + node;
        const bool drafted = node > 0 && node < size;
        const Node own = drafted ? nodes[node] : Node::of(0, 0, 0, stride);
        const int rank = own.at() - (own.next() - stride);
        if (drafted) {
            int* link = rank == 0 ? children + own.parent() : siblings + own.sibling();
            *link = node;
        }
        tokens[i] = drafted ? ids[own.at()] : root;
        parents[i] = drafted ? own.parent() : -1;
        ranks[i] = drafted ? rank : -1;
    }
    if (thread == 0) {
        sizes[b] = size;
        write_status(status, b, fault[0]);
    }
    __syncthreads();
    write_views({depths, positions, retrieve_index, next_token, next_sibling, visible}, b, n, words,
                size, seq_len, children, siblings, [&](int node) { return nodes[node].parent(); });
}

// Writes the views of trees that are given by their parents. Checked is each node by itself, which
// is enough: where all parents stand in front of their children, there is no cycle.
//
// Launch: one block a request.
//
// @kernel tree_links
// @param parents        read  int32 [batch, n]          -1 for node 0, an earlier node elsewhere
// @param sizes?         read  int32 [batch]             nodes of each tree; None: n
// @param seq_lens       read  SEQ_INDEX [batch]         tokens in front of each root
// @param batch          value int32                     requests
// @param n              value int32                     nodes of a request, the root included
// @param words          value int32                     visibility words of a node
// @param depths         write int32 [batch, n]
// @param positions      write int64 [batch, n]          seq_lens + depth
// @param retrieve_index write int64 [batch, n]          b n + node
// @param next_token     write int64 [batch, n]          first child, or -1
// @param next_sibling   write int64 [batch, n]          next node of the same parent, or -1
// @param visible        write uint64 [batch, n, words]  bit k of word w: node 64 w + k is seen
// @param status         write int32 [batch, 2]          code; the first node at fault, or -1
// @block TREE_THREADS
// @shared 12 * n + 48
extern "C" __global__ void __launch_bounds__(TREE_THREADS, 1)
    tree_links(const int* __restrict__ parents, const int* __restrict__ sizes,
               const SEQ_INDEX* __restrict__ seq_lens, int batch, int n, int words, int* depths,
               long long* positions, long long* retrieve_index, long long* next_token,
               long long* next_sibling, unsigned long long* visible, int* status) {
    DYNAMIC_SHARED(cursor);
    CARVE(cursor, int, above, n);
    CARVE(cursor, int, children, n);
    CARVE(cursor, int, siblings, n);
    SHARED_ARRAY(unsigned, fault, [1]);
    const int thread = static_cast<int>(threadIdx.x);
    const int b = static_cast<int>(blockIdx.x);
    int size = sizes == nullptr ? n : sizes[b];
    const bool sized = size >= 1 && size <= n;
    size = sized ? size : 1;

    if (thread == 0) {
        fault[0] = sized ? NO_FAULT : BAD_SIZE;
    }
#pragma unroll 1
    for (int node = thread; node < n; node += TREE_THREADS) {
        children[node] = siblings[node] = -1;
    }
    __syncthreads();
#pragma unroll 1
    for (int node = thread; node < size; node += TREE_THREADS) {
        const int parent = parents[static_cast<long long>(b) * n + node];
        int code = BUILT;
        if (node == 0) {
            code = parent == -1 ? BUILT : NO_ROOT;
        } else if (parent == -1) {
            code = SECOND_ROOT;
        } else if (parent < 0 || parent >= size) {
            code = BAD_PARENT;
        } else if (parent >= node) {
            code = PARENT_BEHIND;
        }
        if (code != BUILT && sized) {
            atomicMin(&fault[0], static_cast<unsigned>(node * CODES + code));
        }
        above[node] = parent;
    }
    __syncthreads();
    size = fault[0] == NO_FAULT ? size : 1;
    if (thread < LANES) {
        link_children(above, size, children, siblings);
    }
    if (thread == 0) {
        write_status(status, b, fault[0]);
    }
    __syncthreads();
    write_views({depths, positions, retrieve_index, next_token, next_sibling, visible}, b, n, words,
                size, static_cast<long long>(seq_lens[b]), children, siblings,
                [&](int node) { return above[node]; });
}

// Writes SGLang's tree mask, the parts of all requests one behind the other.
//
//   FULL         n rows of seq_lens[b] + n bytes; the columns of the prefix are written, by ones,
//                only where `fill_prefix` is not 0
//   QUERY_ONLY   n rows of n bytes
//   BIT_PACKED   n rows of 1, 2 or 4 bytes for up to 8, 16 or 32 nodes
//
// The part of a request that does not fit the buffer is left out, and so is that of a length that is
// negative or no int32, which takes no room; the status says so.
//
// Launch: any number of blocks for each request, in the grid's x; the requests in y.
//
// @kernel tree_mask
// @param visible     read   uint64 [batch, n, words]  of tree_build or tree_links
// @param seq_lens    read   SEQ_INDEX [batch]         tokens in front of each root
// @param batch       value  int32                     requests
// @param n           value  int32                     nodes of a request
// @param words       value  int32                     visibility words of a node
// @param mode        value  int32                     0 full, 1 query-only, 2 bit-packed
// @param fill_prefix value  int32                     0: columns of the prefix are left alone
// @param mask_bytes  value  int64                     length of the mask
// @param mask        update uint8 [mask_bytes]
// @param status      write  int32 [batch]             0; 1 bad length; 2 does not fit
// @block TREE_THREADS
extern "C" __global__ void __launch_bounds__(TREE_THREADS, 1)
    tree_mask(const unsigned long long* __restrict__ visible,
              const SEQ_INDEX* __restrict__ seq_lens, int batch, int n, int words, int mode,
              int fill_prefix, long long mask_bytes, unsigned char* mask, int* status) {
    constexpr int FULL = 0;
    constexpr int BIT_PACKED = 2;
    SHARED_ARRAY(long long, scratch, [block::MAX_WARPS]);
    const int thread = static_cast<int>(threadIdx.x);
    const int b = static_cast<int>(blockIdx.y);

    long long prefixes = 0;
    if (mode == FULL) {
        long long own = 0;
        for (int other = thread; other < b; other += TREE_THREADS) {
            const long long length = static_cast<long long>(seq_lens[other]);
            own += length < 0 || length > MAX_LENGTH ? 0 : length;
        }
        block::inclusive_sum(own, scratch, prefixes);
    }
    const long long given = mode == FULL ? static_cast<long long>(seq_lens[b]) : 0;
    const bool counts = given >= 0 && given <= MAX_LENGTH;
    const long long seq_len = counts ? given : 0;
    const int row_columns = mode == BIT_PACKED ? (n > 16 ? 4 : n > 8 ? 2 : 1) : n;
    const long long row_bytes = seq_len + row_columns;
    const long long begin =
        static_cast<long long>(n) * (prefixes + static_cast<long long>(b) * row_columns);
    const int code = !counts ? 1 : begin + n * row_bytes > mask_bytes ? 2 : 0;
    if (thread == 0 && blockIdx.x == 0) {
        status[b] = code;
    }
    if (code != 0) {
        return;
    }
    for (int row = static_cast<int>(blockIdx.x); row < n; row += static_cast<int>(gridDim.x)) {
        const unsigned long long* seen = visible + (static_cast<long long>(b) * n + row) * words;
        unsigned char* to = mask + begin + row * row_bytes;
        if (fill_prefix != 0) {
            // 16 bytes at a time between the first and the last whole ones
            const unsigned long long address = reinterpret_cast<unsigned long long>(to);
            const long long head = min(static_cast<long long>(-address % 16), seq_len);
            const long long whole = (seq_len - head) / 16;
            const uint4 ones = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
            for (long long i = thread; i < head; i += TREE_THREADS) {
                to[i] = 1;
            }
            for (long long i = thread; i < whole; i += TREE_THREADS) {
                store128(to + head + 16 * i, ones);
            }
            for (long long i = head + 16 * whole + thread; i < seq_len; i += TREE_THREADS) {
                to[i] = 1;
            }
        }
        to += seq_len;
        for (int i = thread; i < row_columns; i += TREE_THREADS) {
            to[i] = static_cast<unsigned char>(mode == BIT_PACKED ? seen[0] >> 8 * i & 255
                                                                  : seen[i / 64] >> i % 64 & 1);
        }
    }
}

// Parents from the lists of EAGLE: node i was drawn as selected_index[i - 1], whose quotient by
// topk is 0 below the root, and else the place in parent_list of the parent's own index. A parent
// that is not among the request's own nodes becomes -2, which tree_links refuses.
//
// Launch: one block a request.
//
// @kernel eagle_parents
// @param selected_index read  int64 [batch, n - 1]
// @param parent_list    read  int64 [batch, width]
// @param batch          value int32                 requests
// @param n              value int32                 nodes of a request, the root included
// @param width          value int32                 entries of parent_list
// @param topk           value int32                 at least 1
// @param parents        write int32 [batch, n]
// @block TREE_THREADS
extern "C" __global__ void __launch_bounds__(TREE_THREADS, 1)
    eagle_parents(const long long* __restrict__ selected_index,
                  const long long* __restrict__ parent_list, int batch, int n, int width, int topk,
                  int* parents) {
    const int b = static_cast<int>(blockIdx.x);
    const long long* selected = selected_index + static_cast<long long>(b) * (n - 1);
    for (int node = static_cast<int>(threadIdx.x); node < n; node += TREE_THREADS) {
        int parent = -1;
        if (node > 0) {
            const long long place = selected[node - 1] < 0 ? -1 : selected[node - 1] / topk;
            parent = place == 0 ? 0 : NOT_FOUND;
            if (place > 0 && place < width) {
                const long long wanted = parent_list[static_cast<long long>(b) * width + place];
                for (int other = 0; other < n - 1; ++other) {
                    if (selected[other] == wanted) {
                        parent = other + 1;
                        break;
                    }
                }
            }
        }
        parents[static_cast<long long>(b) * n + node] = parent;
    }
}

// Parents from visibility words: the last node in front that is seen. A node that does not see
// itself and exactly what its parent sees has parent -2, which tree_links refuses; bits of nodes
// behind it count.
//
// Launch: one block a request.
//
// @kernel visible_parents
// @param visible read  uint64 [batch, n, words]
// @param batch   value int32                 requests
// @param n       value int32                 nodes of a request
// @param words   value int32                 visibility words of a node
// @param parents write int32 [batch, n]
// @block TREE_THREADS
extern "C" __global__ void __launch_bounds__(TREE_THREADS, 1)
    visible_parents(const unsigned long long* __restrict__ visible, int batch, int n, int words,
                    int* parents) {
    const int b = static_cast<int>(blockIdx.x);
    const unsigned long long* rows = visible + static_cast<long long>(b) * n * words;
    for (int node = static_cast<int>(threadIdx.x); node < n; node += TREE_THREADS) {
        const unsigned long long* row = rows + static_cast<long long>(node) * words;
        const int last = (n - 1) / 64;
        int parent = -1;
        for (int w = node / 64; w >= 0 && parent < 0; --w) {
            unsigned long long in_front = row[w];
            in_front &= w == node / 64 ? (1ull << node % 64) - 1 : ~0ull;
            parent = in_front == 0 ? -1 : 64 * w + 63 - __clzll(static_cast<long long>(in_front));
        }
        bool same = node == 0 || parent >= 0;
        for (int w = 0; w <= last && same; ++w) {
            unsigned long long wanted =
                parent < 0 ? 0 : rows[static_cast<long long>(parent) * words + w];
            wanted |= w == node / 64 ? 1ull << node % 64 : 0;
            const int left = n - 64 * w;
            const unsigned long long real = left >= 64 ? ~0ull : (1ull << left) - 1;
            same = ((row[w] ^ wanted) & real) == 0;
        }
        parents[static_cast<long long>(b) * n + node] = same ? parent : NOT_FOUND;
    }
}
