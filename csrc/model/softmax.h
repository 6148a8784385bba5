// The softmax of one row of logits, a piece of the vocabulary at a time. Every way of choosing or scoring a token adds
// the same pieces in the same order, so a token has the same log-probability in all of them.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "../kernels/table.h"

namespace kvarn {

constexpr int kVocabPiece = 256;  // tokens

// Of one piece: its largest logit, the sum of e = exp(logit - largest) and of e * (logit - largest).
struct SoftmaxPiece {
    float largest;
    double sums[2];
};

struct Softmax {
    double log_total = 0, entropy = 0;  // log-probability of a token = its logit - log_total
};

// piece(i) for i in [0, num_pieces), from left to right.
template <class Pieces>
Softmax merge_pieces(int num_pieces, Pieces&& piece) {
    float largest = -std::numeric_limits<float>::infinity();
    for (int i = 0; i < num_pieces; ++i) largest = std::max(largest, piece(i).largest);
    double total = 0, weighted = 0;
    for (int i = 0; i < num_pieces; ++i) {
        const SoftmaxPiece& own = piece(i);
        double below = static_cast<double>(own.largest) - static_cast<double>(largest), factor = std::exp(below);
        if (!(factor > 0)) continue;
        total += own.sums[0] * factor;
        weighted += (own.sums[1] + own.sums[0] * below) * factor;
    }
    double log_sum = std::log(total);
    return {static_cast<double>(largest) + log_sum, std::max(0.0, log_sum - weighted / total)};
}

}  // namespace kvarn
