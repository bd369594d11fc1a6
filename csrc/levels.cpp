// The function table of each level in this build, and the selection among those that this CPU can run.
#include <cstdlib>

#include "outrider.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace outrider {

// Declares the functions of a level and defines its table.
#define OUTRIDER_ENTRY(function) function,
#define OUTRIDER_LEVEL(name)                                    \
  namespace name {                                              \
  OUTRIDER_FUNCTIONS(OUTRIDER_DECLARE)                          \
  const Level table{#name, OUTRIDER_FUNCTIONS(OUTRIDER_ENTRY)}; \
  }

OUTRIDER_LEVEL(portable)
#ifdef HAVE_neon
OUTRIDER_LEVEL(neon)
#endif
#ifdef HAVE_i8mm
OUTRIDER_LEVEL(i8mm)
#endif
#ifdef HAVE_avx2
OUTRIDER_LEVEL(avx2)
#endif
#ifdef HAVE_avx512
OUTRIDER_LEVEL(avx512)
#endif
#ifdef HAVE_amx
OUTRIDER_LEVEL(amx)
#endif

namespace {

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}

// Linux grants the tile registers to a process on request; without the grant the first tile load is fatal.
bool has_amx() {
  constexpr unsigned bf16 = 1u << 22, tiles = 1u << 24, int8 = 1u << 25;
  constexpr long request_permission = 0x1023, tile_data = 18;
  unsigned a, b, c, d;
  if (!has_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if ((d & (bf16 | tiles | int8)) != (bf16 | tiles | int8)) return false;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#elif defined(__aarch64__)
bool has_neon() {
  constexpr unsigned long needed = HWCAP_ASIMDDP | HWCAP_FPHP | HWCAP_ASIMDHP;
  return (getauxval(AT_HWCAP) & needed) == needed;
}

bool has_i8mm() {
  constexpr unsigned long i8mm = 1ul << 13;  // HWCAP2_I8MM, which headers before Linux 5.6 lack
  return has_neon() && (getauxval(AT_HWCAP2) & i8mm) != 0;
}
#endif

std::vector<const Level*> find_levels() {
  std::vector<const Level*> out{&portable::table};
#ifdef HAVE_neon
  if (has_neon()) out.push_back(&neon::table);
#endif
#ifdef HAVE_i8mm
  if (has_i8mm()) out.push_back(&i8mm::table);
#endif
#ifdef HAVE_avx2
  if (has_avx2()) out.push_back(&avx2::table);
#endif
#ifdef HAVE_avx512
  if (has_avx512()) out.push_back(&avx512::table);
#endif
#ifdef HAVE_amx
  if (has_amx()) out.push_back(&amx::table);
#endif
  return out;
}

const std::vector<const Level*>& levels() {
  static const std::vector<const Level*> found = find_levels();
  return found;
}

const Level* find(const std::string& name, const std::string& culprit) {
  std::string names;
  for (const Level* level : levels()) {
    if (level->name == name) return level;
    names += (names.empty() ? "`" : ", `") + std::string(level->name) + "`";
  }
  refuse(culprit + " is `" + name + "`: this machine and this build offer " + names);
}

const Level* first_choice() {
  const char* wanted = std::getenv("OUTRIDER_ISA");
  return wanted && *wanted ? find(wanted, "`OUTRIDER_ISA`") : levels().back();
}

const Level*& current() {
  static const Level* level = first_choice();
  return level;
}

}  // namespace

const Level& level() { return *current(); }

std::vector<std::string> available_levels() {
  std::vector<std::string> names;
  for (const Level* level : levels()) names.emplace_back(level->name);
  return names;
}

void choose_level(const std::string& name) {
  const Level* chosen = find(name, "the instruction set");
  current() = chosen;
}

}  // namespace outrider
