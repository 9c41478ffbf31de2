// Constructs that shaders are full of, each once.
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wunused-variable"
enum class Mode : uchar { add, multiply = 3 };
union Bits { float f; uint u; uchar4 b; };
struct Base { float a; float twice() const device { return 2 * a; } };
struct Derived : Base { float4 v; half h[3]; };
struct Op { template <typename T> T operator()(T a, T b) const { return a + b; } };
template <typename T, typename F> inline T fold(thread const T (&values)[4], F f) {
  T r = values[0];
  for (ushort i = 1; i < 4; ++i) r = f(r, values[i]);
  return r;
}
template <typename T> struct Tile {
  T v[2][2];
  thread T& at(ushort r, ushort c) thread { return v[r][c]; }
  const device T& at(ushort r, ushort c) const device { return v[r][c]; }
  static constexpr constant ushort rows = 2;
};
inline float2 operator*(thread Tile<float>& t, float2 x) { return float2(dot(float2(t.at(0,0), t.at(0,1)), x), dot(float2(t.at(1,0), t.at(1,1)), x)); }
template <typename T> T clamp_to(T x);
template <> inline float clamp_to<float>(float x) { return clamp(x, -1.f, 1.f); }
template <> inline half clamp_to<half>(half x) { return clamp(x, -1.h, 1.h); }
static void bump(device float *p, thread uint &n) { *p += 1.0; n++; }
float pick(Mode m, float a, float b) { switch (m) { case Mode::add: return a + b; case Mode::multiply: return a * b; default: return 0; } }
constant float2 kPairs[] = { float2(1, 2), {3, 4} };
constant half kEps = 1e-3h;
kernel void everyday(device float *y [[ buffer(0) ]],
                     const device Derived* d [[ buffer(1) ]],
                     device const half4 *h [[buffer(2)]],
                     constant Mode & mode [[ buffer(3) ]],
                     volatile device uint *seen [[ buffer(4) ]],
                     uint3 gid [[ thread_position_in_grid ]],
                     ushort lane [[ thread_index_in_simdgroup ]])
{
  if (gid.x != 0) { return; }
  uint n = 0;
  float values[4] = {1, 2, 3, 4};
  Bits bits; bits.f = 1.0f;
  Tile<float> tile = {{{1, 2}, {3, 4}}};
  const float2 product = tile * float2(1, 1);
  y[n++] = fold(values, Op());
  y[n++] = bits.u >> 23;
  y[n++] = product.x * 100 + product.y;
  y[n++] = d->twice() + d[0].v.w + d->h[2];
  y[n++] = pick(mode, 3, 4);
  const device half2* as_pairs = reinterpret_cast<const device half2*>(h);
  y[n++] = as_pairs[1].y + ((device const half*)h)[0];
  y[n++] = clamp_to(5.0f) + float(clamp_to(-7.0h));
  device float &slot = y[n]; slot = 0; bump(&slot, n); 
  float3 list = {1, 2, 3}; float3 nested[2] = {{1, 2, 3}, list.zyx};
  y[n++] = nested[1].x + kPairs[1].y + kPairs[0].x + (kEps > 0 ? 1 : 0);
  seen[0] = seen[0] + 1;
  atomic_fetch_add_explicit((device atomic_uint*)seen, 5u, memory_order_relaxed);
  do { n += 1; } while (n < 9);
  for (;;) { if (++n > 10) break; else continue; }
  y[n] = as_type<float>(as_type<uint>(2.5f)) + (n == 11 ? Tile<float>::rows : 0) + (mode == Mode::multiply);
  uint packed = 0x3C003C00u; half2 one = as_type<half2>(packed); y[n + 1] = one.x + one.y;
  float array_of[3]; for (auto& item : array_of) item = 7; y[n + 2] = array_of[0] + array_of[2];
  unsigned int u = 7u; int s = -7; y[n + 3] = (s >> 1) + (u >> 1) + (s % 3) + abs(s);
  size_t big = size_t(1) << 40; y[n + 4] = float(big >> 38);
  thread float* local = values; *(local + 1) = 9; y[n + 5] = values[1] + local[3];
}
#pragma clang diagnostic pop
