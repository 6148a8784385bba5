// Statistics of what the matrices of a model read, column by column: the raw material of importance matrices.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "project.h"

namespace kvarn {

// Of one input, or of each expert's: sums over all rows seen.
struct ColumnSums {
    int parts = 0, columns = 0;
    std::vector<double> squares, magnitudes;  // (parts, columns)
    std::vector<float> largest;
    std::vector<uint64_t> rows;  // (parts)
    bool keeps_rows = false;     // also keep the rows themselves, until they are taken
    std::vector<std::vector<float>> kept;

    ColumnSums() = default;
    ColumnSums(int parts, int columns);

    // Take in n rows of `columns` floats each.
    void add(const Compute& compute, const float* values, int n, int part = 0);
};

// The four inputs of a layer; down and expert_in have one part for each expert of a mixture.
struct LayerInputs {
    ColumnSums qkv, attention_output, ffn_in, expert_in, ffn_down;

    ColumnSums& named(const std::string& input);  // throws where there is none
    void keep_rows(bool keep);
};

}  // namespace kvarn
