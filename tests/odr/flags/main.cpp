// SPDX-License-Identifier: Apache-2.0
#include "use.hpp"

#include <indexshare/host/isa.hpp>

#include <cmath>
#include <cstdio>

int main() {
  using indexshare::HostIsa;
  // the 40 best of 300 distinct values below 301, which the keys are but for one
  double best = 0;
  bool seen[301] = {};
  for (int s = 0; s < 300; ++s) seen[s * 76 % 301] = true;
  for (int value = 300, n = 0; n < 40; --value) {
    if (!seen[value]) continue;
    best += value;
    ++n;
  }
  best /= 40;
  bool ok = true;
  auto const expect = [&](double got, char const* what, HostIsa isa) {
    bool const holds = std::abs(got - best) < 1e-4;
    std::printf("%s: %s, instruction set %d: %g\n", holds ? "ok" : "FAILED", what,
                static_cast<int>(isa), got);
    ok = ok && holds;
  };
  bool const has_wide = indexshare::runs_here(HostIsa::avx512);
  for (HostIsa const isa :
       {HostIsa::automatic, HostIsa::portable, HostIsa::avx2, HostIsa::avx512}) {
    if (!indexshare::runs_here(isa)) {
      std::printf("not run: this processor lacks instruction set %d\n", static_cast<int>(isa));
      continue;
    }
    expect(flags::baseline(isa), "no flags", isa);
    expect(flags::fast(isa), "-ffast-math", isa);
    if (has_wide) expect(flags::wide(isa), "flags of AVX-512", isa);
  }
  if (!has_wide) std::printf("not run: what is built for AVX-512; it is linked\n");
  return ok ? 0 : 1;
}
