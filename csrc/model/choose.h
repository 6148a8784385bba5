// From hidden states to tokens and their log-probabilities: which rows need whole rows of logits and which do not.
#pragma once
#include "greedy.h"

namespace kvarn {

// Arrays of the caller, one entry per row; tops has num_top of them.
struct Results {
    int32_t* ids;
    float* logprobs;
    float* entropy;
    int32_t* top_ids;
    float* top_logprobs;
    int num_top;

    Top top(size_t row) const {
        size_t at = row * static_cast<size_t>(num_top);
        return {top_ids + at, top_logprobs + at, num_top};
    }
};

// The same for the rows of canvases, which are drawn from p = softmax of what the choice left of the logits.
struct CanvasResults {
    int32_t* best_ids;  // of the largest p
    float* entropy;     // of p
    float* means;       // (rows, width) the sum of p * embedding
};

class Chooser {
public:
    Chooser(Model& model, const KernelTable& kernels, int num_workers)
        : model_(model), head_(model), greedy_(model), sampler_(kernels, model.spec().vocab_size, num_workers),
          plain_(static_cast<size_t>(num_workers)) {}

    // One choice for each row. Everything but ids is filled only when want_logprobs. A state that is not finite gives
    // kNoToken.
    void sample(std::span<const HeadRow> rows, std::span<const RowSampling> params, bool want_logprobs,
                const Results& out);

    // One choice for each row of canvases, none of them greedy, and what the next step reads.
    void sample_canvas(std::span<const HeadRow> rows, std::span<const RowSampling> params, int32_t* ids,
                       const CanvasResults& out);

    // Log-probabilities of given tokens; fills no ids and no entropy.
    void score(std::span<const HeadRow> rows, std::span<const int32_t> targets, const Results& out);

    void logits(std::span<const HeadRow> rows, float* out);

    int vocab_size() const { return model_.spec().vocab_size; }
    size_t logit_bytes() const { return std::max(head_.logit_bytes(), greedy_.logit_bytes()); }

private:
    void sample_greedy(std::span<const HeadRow> rows, std::span<const size_t> at, bool want_logprobs,
                       const Results& out);
    void sample_whole(std::span<const HeadRow> rows, std::span<const size_t> at, std::span<const RowSampling> params,
                      bool want_logprobs, const Results& out);
    bool is_finite(const HeadRow& row) const;
    void add_means(const float* weights, int count, float* means);

    Model& model_;
    Head head_;
    GreedyHead greedy_;
    Sampler sampler_;
    std::vector<std::vector<float>> plain_;  // of each worker: a row of logits, or a piece of the embedding
};

}  // namespace kvarn
