// SPDX-License-Identifier: Apache-2.0
// A program of someone who uses the library: it includes the umbrella and nothing else.
#include <indexshare/indexshare.hpp>

int main() {
  indexshare::Periodic const share{.layers = 8, .freq = 4, .offset = 3};
  return share_source(share, 5) == 2 ? 0 : 1;
}
