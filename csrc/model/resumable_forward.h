// A forward pass that can be interrupted: it runs in pieces of layers, so that other batches can run in between.
#pragma once
#include <algorithm>
#include <span>

#include "step.h"

namespace kvarn {

// What a layer is cut into: projections, attention of some rows at a time, everything behind it.
enum class Piece { qkv, attend, finish };

// How long pieces of one kind take.
struct PieceTimes {
    double last_s = 0, sum_s = 0;
    int count = 0;

    void add(double seconds) {
        last_s = seconds;
        sum_s += seconds;
        ++count;
    }
    double mean_s() const { return count == 0 ? 0 : sum_s / count; }
};

struct ResumableForward {
    BatchView batch;  // the arrays are the caller's, and stay until the end
    std::span<const int32_t> output_rows;
    StepBuffers buffers;
    size_t runs_per_piece = 1;  // of attention
    size_t layer = 0;
    Piece next = Piece::qkv;
    size_t next_run = 0;  // of the layer's attention
    PieceTimes times[3];  // by kind
    double unused_s = 0;  // of the time granted so far
    uint64_t number = 0;

    PieceTimes& times_of(Piece piece) { return times[static_cast<size_t>(piece)]; }
    double piece_s() const { return std::max({times[0].mean_s(), times[1].mean_s(), times[2].mean_s()}); }
};

}  // namespace kvarn
