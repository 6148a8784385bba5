// How a step's RowSampling (backends/batch.py) come over from Python: one array of records, and arrays for what differs
// in length.
#pragma once
#include <tuple>
#include <vector>

#include "../base/check.h"
#include "../model/choose.h"
#include "arrays.h"

namespace kvarn {

// The numbers of a RowSampling under their names there. Python asks sampling_record() for names, types and offsets.
// clang-format off
#define KVARN_SAMPLING_FIELDS(X)                                                                              \
    X(uint64_t, seed) X(uint64_t, top_k) X(uint64_t, choice) X(uint64_t, position) X(uint64_t, draw)          \
    X(float, temperature) X(float, top_p) X(float, min_p) X(float, typical_p)                                 \
    X(float, repetition_penalty) X(float, presence_penalty) X(float, frequency_penalty)                       \
    X(float, xtc_probability) X(float, xtc_threshold) X(float, cfg_scale)
// clang-format on

struct SamplingRecord {
#define KVARN_MEMBER(type, name) type name;
    KVARN_SAMPLING_FIELDS(KVARN_MEMBER)
#undef KVARN_MEMBER
};

nb::dict sampling_record();  // for numpy.dtype

//   records                   (rows, bytes of a SamplingRecord)
//   bias_ids, bias_values     of all rows one after the other; row i has [bias_starts[i], bias_starts[i + 1])
//   bias_starts (rows + 1)
//   seen_ids, seen_counts     likewise with seen_starts
//   masked_rows (m)           rows that have a mask
//   masks (m, words)          theirs
using SamplingArrays = std::tuple<In2<uint8_t>, In1<int32_t>, In1<float>, In1<int32_t>, In1<int32_t>, In1<int32_t>,
                                  In1<int32_t>, In1<int32_t>, In2<uint32_t>>;

// What is returned has views of the arrays. Throws when they do not fit together.
std::vector<RowSampling> read_sampling(const SamplingArrays& arrays);

// A row of the hidden states that Python passes.
inline const float* state_of(const In2<float>& hidden, int32_t row) {
    require(row >= 0 && static_cast<size_t>(row) < hidden.shape(0), "a row to sample is outside the hidden states");
    return hidden.data() + static_cast<size_t>(row) * hidden.shape(1);
}

inline std::vector<HeadRow> all_rows(const In2<float>& hidden, const std::vector<AdapterUses>& uses) {
    std::vector<HeadRow> rows;
    for (size_t row = 0; row < hidden.shape(0); ++row) {
        rows.push_back({hidden.data() + row * hidden.shape(1)});
        if (!uses.empty()) rows.back().adapters = &uses[row];
    }
    return rows;
}

}  // namespace kvarn
