// One step's sequences, as in backends/batch.py; validated before it gets to the layers.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "adapter.h"

namespace kvarn {

// Pack the K and V that matter most to positions [block_start, block_end) of a sequence into the blocks of table.
struct Keep {
    int sequence, block_start, block_end, num_kept;
    std::vector<int32_t> table;
    bool is_per_head;
    int pool_kernel;  // odd
};

// What the last step left for the rows of a canvas, (rows, width); rows 0: this is its first.
struct FeedbackView {
    const float* values = nullptr;
    int rows = 0, width = 0;
};

struct BatchView {
    int num_tokens, num_sequences, table_width;
    const int32_t* token_ids;
    const int32_t* positions;
    const int32_t* row_starts;
    const int32_t* context_lens;
    const int32_t* block_tables;
    const int32_t* window_tables;  // of the layers that keep a window, -1: not read; null: there are none
    const int32_t* slot_shifts;    // null: all 0
    std::vector<Keep> keep;
    const int32_t *state_read, *state_written;      // slots by sequence, -1: zeros; null: none
    std::vector<std::pair<int, int>> saved_states;  // (row, slot), rows ascending
    std::vector<AdapterUses> adapters;              // by sequence; empty: none
    const float* inputs;                            // (tokens, input_width), null: tokens are embedded
    int input_width;
    const int32_t* canvas_starts = nullptr;  // by sequence: the first position of its canvas; null: none has one
    std::vector<FeedbackView> feedback;      // by sequence, where there are canvases

    const int32_t* blocks(int sequence, bool is_windowed = false) const {
        return (is_windowed ? window_tables : block_tables) +
               static_cast<size_t>(sequence) * static_cast<size_t>(table_width);
    }
    // Which sequence a row belongs to.
    int sequence_of(int row) const {
        return static_cast<int>(std::upper_bound(row_starts, row_starts + num_sequences + 1, row) - row_starts) - 1;
    }
    int canvas_start(int sequence) const {
        return canvas_starts == nullptr ? std::numeric_limits<int>::max() : canvas_starts[sequence];
    }
    // The first row of a sequence that is one of its canvas; behind its last one: there is none.
    int first_canvas_row(int sequence) const {
        const int first = row_starts[sequence], end = row_starts[sequence + 1];
        if (canvas_starts == nullptr) return end;
        return std::clamp(first + canvas_starts[sequence] - positions[first], first, end);
    }
    int shift(int sequence) const { return slot_shifts == nullptr ? 0 : slot_shifts[sequence]; }
};

}  // namespace kvarn
