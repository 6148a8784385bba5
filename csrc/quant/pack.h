// Packed weight layouts: rows in groups of 8, so that one vector load holds 4 columns of 8 rows.
//
// A group of 8 rows is stored contiguously, column block after column block. For block types of 32 values:
//   Q4_0, IQ4_NL  d f16[8]                | nibbles u8[4][8][4]
//   Q4_1          d f16[8] m f16[8]       | nibbles u8[4][8][4]
//   Q5_0          d f16[8]                | nibbles u8[4][8][4] | high u8[8][4]
//   Q5_1          d f16[8] m f16[8]       | nibbles u8[4][8][4] | high u8[8][4]
//   Q8_0          d f16[8]                | q i8[8][8][4]
// nibbles[j][row][c]: low four bits are column 4j + c, high four bits column 16 + 4j + c.
// high[row][c] bit j is the fifth bit of column 4j + c, j = 0..7.
// q[j][row][c] is column 4j + c.
// For super-blocks of 256 values (s = sub-block of 32, h = sub-block of 16):
//   Q4_K  d f16[8] dmin f16[8] scale u8[8 s][8 rows] min u8[8 s][8 rows] | nibbles u8[8 s][4][8][4]
//   Q5_K  as Q4_K                                                       | then high u8[8 s][8][4]
//   Q6_K  d f16[8] scale i8[16 h][8 rows]                | nibbles u8[8 s][4][8][4] | high u8[8 s][2][8][4]
//   Q3_K  d f16[8] scale i8[16 h][8 rows] (minus 32)     | low u8[8 s][2][8][4]     | high u8[8 s][8][4]
//   Q2_K  d f16[8] dmin f16[8] scale_min u8[16 h][8 rows] (low nibble scale, high nibble min) | low u8[8 s][2][8][4]
// Two-bit fields low/high[i][row][c]: bits 2j..2j+1 belong to column 16i + 4j + c, j = 0..3.
// Q6_K and Q3_K values are kept unsigned (0..63, 0..7) and corrected by 32 and 4 through the activation sums.
// F32, F16, BF16: value[column][8 rows], any number of columns.
// Rows beyond the matrix are zero: scale 0 and quants 0.
#pragma once
#include <cstddef>
#include <cstdint>

#include "../kernels/table.h"

namespace kvarn {

struct BlockShape {
    int values;        // per block of one row
    int bytes;         // of one block of one row in the file
    int packed_bytes;  // of one block of 8 rows, packed
};

bool is_quantized(Type type);
BlockShape block_shape(Type type);  // throws std::invalid_argument for an unknown type

size_t packed_group_bytes(Type type, int columns);
inline int num_groups(int rows) { return (rows + kLanes - 1) / kLanes; }

// Pack the row groups [group_begin, group_end) of a row-major matrix as stored in a file.
void pack_groups(Type type, const uint8_t* source, int rows, int columns, int group_begin, int group_end,
                 uint8_t* packed) noexcept;

// Dequantise one row of a packed matrix: the definition of every layout above.
void unpack_row(Type type, const uint8_t* packed, int columns, int row, float* out) noexcept;

// Columns [begin, end) of it, whole blocks of the type.
void unpack_columns(Type type, const uint8_t* packed, int columns, int row, int begin, int end, float* out) noexcept;

}  // namespace kvarn
