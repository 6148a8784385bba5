// The shape of one product of tiles, the same with and without AMX.
#pragma once
#include "../table.h"

namespace kvarn::avx512_amx {
namespace {

constexpr int kTileRows = 16;     // tokens, or rows of the weights
constexpr int kTileColumns = 32;  // of both
constexpr int kTileValues = kTileRows * kTileColumns;
static_assert(kTileColumns == kQuantBlock && kTileTokens == 2 * kTileRows);

}  // namespace
}  // namespace kvarn::avx512_amx
