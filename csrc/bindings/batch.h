// Batch of backends/batch.py, read by the names of its fields.
#pragma once
#include <optional>
#include <vector>

#include "../model/batch.h"
#include "adapter.h"
#include "arrays.h"

namespace kvarn {

// Keeps the arrays that its view points into.
class Batch {
public:
    explicit Batch(nb::handle batch);  // throws when the arrays do not fit together

    BatchView view() const;
    std::span<const int32_t> output_rows() const { return kvarn::view(output_rows_); }

private:
    void read_states(nb::handle states);
    void read_canvases(nb::handle canvases);

    In1<int32_t> token_ids_, positions_, row_starts_, context_lens_;
    In2<int32_t> block_tables_;
    In1<int32_t> output_rows_;
    std::optional<In2<int32_t>> window_tables_;
    std::optional<In1<int32_t>> slot_shifts_;
    std::vector<Keep> keep_;
    std::optional<In1<int32_t>> state_read_, state_written_;
    std::vector<std::pair<int, int>> saved_states_;
    std::vector<AdapterUses> adapters_;
    std::optional<In2<float>> inputs_;
    std::optional<In1<int32_t>> canvas_starts_;
    std::vector<std::optional<In2<float>>> feedback_;
};

}  // namespace kvarn
