// Packed weights of one model, by name: one huge-page region for the matrices, plain floats for the vectors.
#pragma once
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "../base/memory.h"
#include "../base/thread_pool.h"
#include "../quant/pack.h"

namespace kvarn {

struct Matrix {
    Type type = Type::F32;
    int rows = 0, columns = 0;
    uint8_t* packed = nullptr;

    int groups() const { return num_groups(rows); }
    size_t group_bytes() const { return packed_group_bytes(type, columns); }
};

class Weights {
public:
    // Size of a stack of `parts` matrices after packing, each part starting on a cache line.
    static size_t packed_bytes(Type type, int parts, int rows, int columns);

    void reserve(size_t bytes) { region_ = PageRegion(bytes, true); }

    // Pack a row-major (parts, rows, columns) tensor as stored in a file, in turn with the steps of other models.
    void add_matrices(const std::string& name, Type type, int parts, int rows, int columns, const uint8_t* source,
                      ThreadTeam& pool);
    // Put another form of a loaded stack in its place, of the same shape; restore_matrices puts the first one back.
    void replace_matrices(const std::string& name, Type type, std::span<const uint8_t> source, ThreadTeam& pool);
    void restore_matrices(const std::string& name);
    void add_vector(const std::string& name, std::vector<float> values) { vectors_[name] = std::move(values); }

    const Matrix& matrix(const std::string& name, int rows, int columns) const;  // throws unless it is exactly so
    const std::vector<Matrix>& matrices(const std::string& name, int parts, int rows, int columns) const;
    const float* vector(const std::string& name, int size) const;

private:
    struct Replaced {
        PageRegion region;
        std::vector<Matrix> original;
    };

    PageRegion region_;
    size_t used_ = 0;
    std::unordered_map<std::string, Replaced> replaced_;
    std::unordered_map<std::string, std::vector<Matrix>> matrices_;
    std::unordered_map<std::string, std::vector<float>> vectors_;
};

}  // namespace kvarn
