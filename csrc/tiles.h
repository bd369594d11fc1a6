// Configuration of the eight AMX tile registers.
#pragma once
#include <cstdint>

namespace outrider::LEVEL {
namespace {

// Configures the tiles for the lifetime of the object; shape(tile) returns rows and bytes per row.
class Tiles {
 public:
  struct Shape {
    int rows, row_bytes;
  };
  template <class Of>
  explicit Tiles(const Of& shape) {
    alignas(64) struct {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; ++tile) {
      const Shape one = shape(tile);
      config.rows[tile] = uint8_t(one.rows);
      config.row_bytes[tile] = uint16_t(one.row_bytes);
    }
    asm volatile("ldtilecfg\t%0" ::"m"(config) : "memory");
  }
  ~Tiles() { asm volatile("tilerelease" ::: "memory"); }
  Tiles(const Tiles&) = delete;
};

}  // namespace
}  // namespace outrider::LEVEL
