// Every entry of a table beside the products, for what is done to all of them: X(rms_norm) and so on.
#pragma once
#include "table.h"

namespace kvarn {

// clang-format off
#define KVARN_ENTRIES(X)                                                                                      \
    X(quantize_row) X(round_row) X(rms_norm) X(layer_norm) X(add) X(silu_mul) X(gelu_tanh_mul) X(gelu)        \
    X(sigmoid_mul) X(convolve) X(delta_step) X(state_step) X(selective_step)                                  \
    X(attend_f16) X(attend_f32) X(attend_q8_0) X(store_kv_f16) X(store_kv_f32) X(store_kv_q8_0)               \
    X(argmax) X(sum_exp) X(softmax_sums)                                                                      \
    X(low_rank_in_f16) X(low_rank_in_f32) X(low_rank_add_f16) X(low_rank_add_f32)
// clang-format on
#define KVARN_ONE(entry) +1
static_assert(sizeof(KernelTable) == (1 + kNumTypes KVARN_ENTRIES(KVARN_ONE)) * sizeof(void (*)()),
              "KVARN_ENTRIES must name every entry of KernelTable");
#undef KVARN_ONE

}  // namespace kvarn
