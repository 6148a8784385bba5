#include "../avx512_amx/matmul.h"

#include "tiles.h"

namespace kvarn::avx512_amx_emulated {

constinit const KernelTable matmul_kernels = avx512_amx::make_matmul_kernels<Tiles>();

}  // namespace kvarn::avx512_amx_emulated
