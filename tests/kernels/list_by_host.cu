// A slot list as it should not be gathered: one block for each 16 slots that the host counted, and no
// loop over the rest. Launched by a graph it gathers as many as its capture had.
//
// @kernel list_by_host
// @param kv_indptr        read   int32 [batch + 1]
// @param req_pool_indices read   int64 [batch]
// @param req_to_token     read   int32 [*, *] stride=(row_stride, 1)
// @param row_stride       value  int64
// @param batch            value  int32
// @param kv_indices       update int64 [*]
// @block 16
extern "C" __global__ void list_by_host(const int* __restrict__ kv_indptr,
                                        const long long* __restrict__ req_pool_indices,
                                        const int* __restrict__ req_to_token, long long row_stride,
                                        int batch, long long* __restrict__ kv_indices) {
    const int at = blockIdx.x * 16 + threadIdx.x;
    if (at >= kv_indptr[batch]) {
        return;
    }
    int b = 0;
    while (at >= kv_indptr[b + 1]) {
        ++b;
    }
    kv_indices[at] = req_to_token[req_pool_indices[b] * row_stride + at - kv_indptr[b]];
}
