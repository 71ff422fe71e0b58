// SPDX-License-Identifier: Apache-2.0
#include "use.hpp"

#include <cstdio>

float other_result();
void const* other_address();

int main() {
  bool ok = true;
  auto const expect = [&ok](bool holds, char const* what) {
    std::printf("%s: %s\n", holds ? "ok" : "FAILED", what);
    ok = ok && holds;
  };
  expect(odr::run_layer(indexshare::HostExec<>{}) == 1.5F, "a layer on the host");
  expect(odr::run_layer(indexshare::ReferenceExec{}) == 1.5F, "a layer of the reference");
  expect(other_result() == 1.5F, "a layer in the other translation unit");
  // An inline variable is one object in the whole program.
  expect(other_address() == static_cast<void const*>(&indexshare::version_minor),
         "one entity, one address");
  return ok ? 0 : 1;
}
