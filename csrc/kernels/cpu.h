// What this CPU can do, as far as the kernels care.
#pragma once
#include <map>
#include <string>
#include <vector>

namespace kvarn {

std::vector<std::string> cpu_features();  // of those any kernel folder may use, lower case, for `kvarn doctor`
bool cpu_has_avx2_table();                // AVX2, FMA and F16C, with the registers saved by the system

bool cpu_has_avx512_table();       // beside those AVX-512 F, BW, VL and DQ
bool cpu_has_avx512_vnni_table();  // and VNNI
bool cpu_has_avx512_bf16_table();  // and BF16 and VBMI: all that the AMX table needs beside the tiles
bool cpu_has_avx512_amx_table();   // and AMX with bf16
bool ask_for_tiles();              // Linux saves the tiles of a process only once it has asked for them

bool cpu_has_neon_table();       // Advanced SIMD
bool cpu_has_neon_dot_table();   // and sdot
bool cpu_has_neon_i8mm_table();  // and smmla

std::vector<std::string> kernel_tables();    // names this CPU can run, best first
std::vector<std::string> emulated_tables();  // of tables that compute what another CPU's do, for tests; never chosen

// For each kernel of a table of this build, whether this CPU can run it or not: the table that brought it along.
std::map<std::string, std::string> kernel_origins(const std::string& table);

}  // namespace kvarn
