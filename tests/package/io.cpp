// SPDX-License-Identifier: Apache-2.0
// A program of someone who uses the readers: they link, and refuse what is no configuration.
#include <indexshare/io/config.hpp>

int main() { return indexshare::io::parse_config("{}") ? 1 : 0; }
