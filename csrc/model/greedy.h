// The most probable token of rows of hidden states, its log-probability, the entropy and the next best, while logits
// exist only for a piece of the vocabulary at a time: never rows x vocabulary, nor one row of it.
#pragma once
#include <vector>

#include "head.h"
#include "sample.h"
#include "softmax.h"

namespace kvarn {

struct Greedy {
    int32_t id = Sampler::kNoToken;  // ties to the lower id; kNoToken when the largest logit is not finite
    double logprob = 0;
    Softmax softmax;  // without biases
};

class GreedyHead {
public:
    explicit GreedyHead(Model& model) : model_(model) {}

    // tops, if any, are filled with the most probable tokens of each row; without want_logprobs only ids are.
    void choose(std::span<const HeadRow> rows, bool want_logprobs, std::span<Greedy> out, std::span<const Top> tops);

    size_t logit_bytes() const { return logit_bytes_; }  // the most that were alive at once

private:
    struct Candidate {
        float logit;
        int32_t id;
        float plain;  // its logit without bias
        bool operator>(const Candidate& other) const {
            return logit != other.logit ? logit > other.logit : id < other.id;
        }
    };

    void pass(std::span<const HeadRow> rows, bool want_logprobs, std::span<Greedy> out, std::span<const Top> tops);
    void reduce(std::span<const HeadRow> rows, int piece, int worker, bool want_logprobs, float* logits);
    void reduce_row(const HeadRow& row, int piece, bool want_logprobs, float* logits, std::span<Candidate> found,
                    SoftmaxPiece& sums);
    static void insert(std::span<Candidate> best, Candidate candidate);
    static Candidate largest_logit(const KernelTable& kernels, const float* logits, int n, int first_id);
    static Candidate largest_biased_logit(const KernelTable& kernels, const HeadRow& row, float* logits, int n,
                                          int first_id);
    Greedy merge(size_t row, size_t num_rows, bool want_logprobs, std::span<Candidate> found);

    int num_pieces() const { return (model_.spec().vocab_size + kVocabPiece - 1) / kVocabPiece; }
    // The largest with biases, and behind it num_best_ without, sorted.
    std::span<Candidate> found_by(int worker, size_t row, size_t num_rows) {
        size_t at = (static_cast<size_t>(worker) * num_rows + row) * (1 + num_best_);
        return std::span(found_).subspan(at, 1 + num_best_);
    }

    Model& model_;
    Arena arena_;
    LowRankRows low_rank_;
    std::vector<Candidate> found_;      // [worker][row][1 + num_best]
    std::vector<SoftmaxPiece> pieces_;  // [piece][row]
    size_t num_best_ = 0, logit_bytes_ = 0;
};

}  // namespace kvarn
