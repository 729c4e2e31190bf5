// FlashInfer's MLA attention for Hopper behind a C interface, for ctypes: bf16, page size 1, no
// mask. Built by nvcc on the machine that runs it, from the headers inside FlashInfer's wheel.
//
// A plan is a list of FlashInfer's own numbers; the caller keeps it and the buffers it points into.

#include <cstdint>
#include <vector>

#include <flashinfer/attention/mla_hopper.cuh>
#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/fastdiv.cuh>

namespace {

constexpr int kLatent = 512;
constexpr int kRope = 64;
constexpr int kWidth = kLatent + kRope;

using Element = __nv_bfloat16;
using Params = flashinfer::MLAParams<Element, Element, Element, int32_t>;

struct Buffers {
    char* floats;   // partials, on the device
    char* numbers;  // the plan's lists, on the device
    int32_t* list(int64_t offset) const { return reinterpret_cast<int32_t*>(numbers + offset); }
};

}  // namespace

// Plans requests of `bounds[i + 1] - bounds[i]` query tokens and `lengths[i]` keys; all lists are on
// the host. `staging` is pinned memory of `number_bytes`. Writes 18 numbers into `plan`.
extern "C" int mla_plan(void* floats, size_t float_bytes, void* numbers, void* staging,
                        size_t number_bytes, int32_t* query_bounds, int32_t* key_bounds,
                        int32_t* lengths, int requests, int heads, void* stream, int64_t* plan) {
    flashinfer::MLAPlanInfo info;
    const cudaError_t status = flashinfer::MLAPlan<int32_t>(
        floats, float_bytes, numbers, staging, number_bytes, info, query_bounds, key_bounds,
        lengths, static_cast<uint32_t>(requests), static_cast<uint32_t>(heads), kLatent, false,
        static_cast<cudaStream_t>(stream));
    const std::vector<int64_t> words = info.ToVector();
    for (size_t word = 0; word < words.size(); ++word) {
        plan[word] = words[word];
    }
    return static_cast<int>(status);
}

// Attends by a plan: queries [N, heads, 576] and rows [slots, 576], latent columns first. `lse` is
// [N, heads], to base 2.
extern "C" int mla_run(void* floats, void* numbers, const int64_t* plan, void* queries, void* rows,
                       int32_t* slots, void* out, float* lse, int heads, float scale,
                       void* stream) {
    flashinfer::MLAPlanInfo info;
    info.FromVector(std::vector<int64_t>(plan, plan + 18));
    const Buffers at{static_cast<char*>(floats), static_cast<char*>(numbers)};
    Params call{};
    call.q_nope = static_cast<Element*>(queries);
    call.q_pe = call.q_nope + kLatent;
    call.ckv = static_cast<Element*>(rows);
    call.kpe = call.ckv + kLatent;
    call.final_o = static_cast<Element*>(out);
    call.final_lse = lse;
    call.partial_o = reinterpret_cast<Element*>(at.floats + info.partial_o_offset);
    call.partial_lse = reinterpret_cast<float*>(at.floats + info.partial_lse_offset);
    call.kv_indices = slots;
    call.q_indptr = at.list(info.q_indptr_offset);
    call.kv_indptr = at.list(info.kv_indptr_offset);
    call.partial_indptr = at.list(info.partial_indptr_offset);
    call.q_len = at.list(info.q_len_offset);
    call.kv_len = at.list(info.kv_len_offset);
    call.q_start = at.list(info.q_start_offset);
    call.kv_start = at.list(info.kv_start_offset);
    call.kv_end = at.list(info.kv_end_offset);
    call.work_indptr = at.list(info.work_indptr_offset);
    call.merge_packed_offset_start = at.list(info.merge_packed_offset_start_offset);
    call.merge_packed_offset_end = at.list(info.merge_packed_offset_end_offset);
    call.merge_partial_packed_offset_start = at.list(info.merge_partial_packed_offset_start_offset);
    call.merge_partial_packed_offset_end = at.list(info.merge_partial_packed_offset_end_offset);
    call.merge_partial_stride = at.list(info.merge_partial_stride_offset);
    call.num_heads = flashinfer::uint_fastdiv(static_cast<uint32_t>(heads));
    call.block_size = flashinfer::uint_fastdiv(1);
    call.q_nope_stride_n = call.q_pe_stride_n = static_cast<uint32_t>(heads * kWidth);
    call.q_nope_stride_h = call.q_pe_stride_h = kWidth;
    call.ckv_stride_page = call.ckv_stride_n = kWidth;
    call.kpe_stride_page = call.kpe_stride_n = kWidth;
    call.o_stride_n = static_cast<uint32_t>(heads * kLatent);
    call.o_stride_h = kLatent;
    call.sm_scale = scale;
    call.return_lse_base_on_e = false;
    return static_cast<int>(
        flashinfer::mla::BatchMLAPageAttentionHopper<flashinfer::MaskMode::kNone, kLatent, kRope>(
            call, static_cast<uint32_t>(info.num_blks_x), static_cast<uint32_t>(info.num_blks_y),
            static_cast<cudaStream_t>(stream)));
}
