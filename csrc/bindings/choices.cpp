#include "choices.h"

#include "../base/check.h"

namespace kvarn {

namespace {

// Part i of an array that holds the parts of all rows.
template <class T>
std::span<const T> part(const In1<T>& values, const In1<int32_t>& starts, size_t i) {
    int32_t begin = starts.data()[i], end = starts.data()[i + 1];
    require(0 <= begin && begin <= end && static_cast<size_t>(end) <= values.size(), "starts of rows do not fit");
    return view(values).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
}

}  // namespace

std::vector<Choice> read_choices(const ChoiceArrays& arrays) {
    const auto& [numbers, wholes, bias_ids, bias_values, bias_starts, seen_ids, seen_counts, seen_starts, masked_rows,
                 masks] = arrays;
    size_t rows = numbers.shape(0);
    require(numbers.shape(1) == 10 && wholes.shape(0) == rows && wholes.shape(1) == 5 &&
                bias_starts.size() == rows + 1 && seen_starts.size() == rows + 1 &&
                bias_ids.size() == bias_values.size() && seen_ids.size() == seen_counts.size() &&
                masks.shape(0) == masked_rows.size(),
            "the arrays of the choices do not fit together");
    std::vector<Choice> choices(rows);
    for (size_t i = 0; i < rows; ++i) {
        Choice& c = choices[i];
        const float* f = numbers.data() + 10 * i;
        const uint64_t* w = wholes.data() + 5 * i;
        c.temperature = f[0], c.top_p = f[1], c.min_p = f[2], c.typical_p = f[3];
        c.repetition_penalty = f[4], c.presence_penalty = f[5], c.frequency_penalty = f[6];
        c.xtc_probability = f[7], c.xtc_threshold = f[8], c.cfg_scale = f[9];
        c.top_k = static_cast<int>(w[0]), c.seed = w[1];
        c.index = static_cast<uint32_t>(w[2]), c.position = static_cast<uint32_t>(w[3]);
        c.draw = static_cast<uint32_t>(w[4]);
        c.bias_ids = part(bias_ids, bias_starts, i), c.bias_values = part(bias_values, bias_starts, i);
        c.seen_ids = part(seen_ids, seen_starts, i), c.seen_counts = part(seen_counts, seen_starts, i);
    }
    for (size_t i = 0; i < masked_rows.size(); ++i) {
        int32_t row = masked_rows.data()[i];
        require(row >= 0 && static_cast<size_t>(row) < rows, "a mask names a row that is not there");
        choices[static_cast<size_t>(row)].mask = view(masks).subspan(i * masks.shape(1), masks.shape(1));
    }
    return choices;
}

}  // namespace kvarn
