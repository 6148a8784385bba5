#include "observe.h"

#include <cmath>
#include <map>

#include "../base/check.h"

namespace kvarn {

namespace { constexpr int kColumnsPerTask = 128; }

ColumnSums::ColumnSums(int parts, int columns) : parts(parts), columns(columns) {
    const size_t count = static_cast<size_t>(parts) * static_cast<size_t>(columns);
    squares.resize(count);
    magnitudes.resize(count);
    largest.resize(count);
    rows.resize(static_cast<size_t>(parts));
    kept.resize(static_cast<size_t>(parts));
}

void ColumnSums::add(const Compute& compute, const float* values, int n, int part) {
    const size_t stride = static_cast<size_t>(columns), first = static_cast<size_t>(part) * stride;
    rows[static_cast<size_t>(part)] += static_cast<uint64_t>(n);
    if (keeps_rows) {
        std::vector<float>& all = kept[static_cast<size_t>(part)];
        all.insert(all.end(), values, values + static_cast<size_t>(n) * stride);
    }
    compute.pool.run((columns + kColumnsPerTask - 1) / kColumnsPerTask, [&](int task, int) {
        const int begin = task * kColumnsPerTask, count = std::min(kColumnsPerTask, columns - begin);
        float square[kColumnsPerTask] = {}, magnitude[kColumnsPerTask] = {}, most[kColumnsPerTask] = {};
        for (int row = 0; row < n; ++row) {
            const float* x = values + static_cast<size_t>(row) * stride + begin;
            for (int i = 0; i < count; ++i) {
                const float size = std::fabs(x[i]);
                square[i] += size * size;
                magnitude[i] += size;
                most[i] = size > most[i] ? size : most[i];
            }
        }
        for (int i = 0; i < count; ++i) {
            const size_t at = first + static_cast<size_t>(begin + i);
            squares[at] += static_cast<double>(square[i]);
            magnitudes[at] += static_cast<double>(magnitude[i]);
            largest[at] = std::max(largest[at], most[i]);
        }
    });
}

ColumnSums& LayerInputs::named(const std::string& input) {
    const std::map<std::string, ColumnSums*> by_name = {{"qkv", &qkv},
                                                        {"attention_output", &attention_output},
                                                        {"ffn_in", &ffn_in},
                                                        {"expert_in", &expert_in},
                                                        {"ffn_down", &ffn_down}};
    require(by_name.contains(input), "no such input: " + input);
    return *by_name.at(input);
}

void LayerInputs::keep_rows(bool keep) {
    for (ColumnSums* input : {&qkv, &attention_output, &ffn_in, &expert_in, &ffn_down}) {
        input->keeps_rows = keep;
        for (std::vector<float>& rows : input->kept) rows = {};
    }
}

}  // namespace kvarn
