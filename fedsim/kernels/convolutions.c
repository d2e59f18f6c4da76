/* A max-pooled convolution, with each window's winner, and its gradients from the winners alone.

   Each number of a gradient is one sum over its terms in one order, with one rounding for a product
   and its sum (built with -ffp-contract=fast, on processors that have it). So the bytes depend
   neither on which numbers share a register nor on how wide a register is. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && !defined(__FMA__)
#error "a product and its sum must be one rounding"
#endif

#ifndef BYTES
#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
#endif

enum { LANES = BYTES / 4, WIDE = 12, WORD = 64 };

typedef float lanes_t __attribute__((vector_size(BYTES)));
typedef float unaligned_t __attribute__((vector_size(BYTES), aligned(4), may_alias));
typedef int32_t words_t __attribute__((vector_size(BYTES)));
typedef int64_t places_t __attribute__((vector_size(2 * BYTES)));

/* Largest values of a window of `rows` rows of `length` places, the first at `x`, and the place
   where each was first found, for `channels` channels: a register at most. Places are `stride`
   numbers apart, rows of an image `across` places. `place` is the number of the window's first
   place. NaN counts as larger than all numbers, as in torch. */
static inline __attribute__((always_inline)) void take_largest(
    const float *x, int64_t rows, int64_t length, int64_t stride, int64_t place, int64_t across,
    const size_t channels, float *largest, int64_t *winners)
{
    lanes_t most = -__builtin_inff() - (lanes_t){0};
    words_t winner = (int32_t)place - (words_t){0};
    for (int64_t row = 0; row < rows; row++, x += across * stride, place += across)
        for (int64_t i = 0; i < length; i++) {
            const lanes_t value = *(const unaligned_t *)(x + i * stride);
            const words_t wins = (value > most) | (value != value);
            most = (lanes_t)((wins & (words_t)value) | (~wins & (words_t)most));
            winner = (wins & (int32_t)(place + i)) | (~wins & winner);
        }
    const places_t places = __builtin_convertvector(winner, places_t);
    memcpy(largest, &most, sizeof(float) * channels);
    memcpy(winners, &places, sizeof(int64_t) * channels);
}

/* What a convolution reads at a place: `rows` rows of `length` numbers, `step` apart. Adjacent
   places are `next` apart. It has `channels` outputs, padded to whole registers. */
typedef struct {
    int64_t rows, length, step, next, channels;
} convolution_t;

/* Outputs at `places` adjacent places, in `registers` registers of channels. Each sum begins with
   its bias, and its products are added in the order of a patch. */
static inline __attribute__((always_inline)) void convolve_some(
    const int places, const int registers, const convolution_t *layer, const float *x,
    const float *weights, const float *bias, float *into)
{
    lanes_t sum[WIDE];
#pragma GCC unroll 12
    for (int k = 0; k < places * registers; k++)
        sum[k] = *(const unaligned_t *)(bias + k % registers * LANES);
    for (int64_t row = 0; row < layer->rows; row++, x += layer->step)
        for (int64_t i = 0; i < layer->length; i++, weights += layer->channels) {
#pragma GCC unroll 12
            for (int place = 0; place < places; place++) {
                const lanes_t value = x[place * layer->next + i] - (lanes_t){0};
#pragma GCC unroll 2
                for (int k = 0; k < registers; k++)
                    sum[place * registers + k] +=
                        value * *(const unaligned_t *)(weights + k * LANES);
            }
        }
#pragma GCC unroll 12
    for (int k = 0; k < places * registers; k++)
        *(unaligned_t *)(into + k / registers * layer->channels + k % registers * LANES) = sum[k];
}

/* Outputs at `places` adjacent places, as many at a time as there are registers for. */
static void convolve_row(const convolution_t *layer, int64_t places, const float *x,
                         const float *weights, const float *bias, float *into)
{
    for (int64_t c = 0; c < layer->channels;) {
        const int registers = c + 2 * LANES <= layer->channels ? 2 : 1;
        /* Parts of nearly one size: a small one would not fill the processor's pipeline. */
        const int64_t parts = (places * registers + WIDE - 1) / WIDE;
        const int64_t size = (places + parts - 1) / parts;
        for (int64_t first = 0; first < places; first += size) {
            const int64_t count = places - first < size ? places - first : size;
            const float *from = x + first * layer->next;
            float *to = into + first * layer->channels + c;
            switch (registers * (WIDE + 1) + count) {
#define CASE(registers, count)                                                                     \
    case (registers) * (WIDE + 1) + (count):                                                       \
        convolve_some(count, registers, layer, from, weights + c, bias + c, to);                   \
        break;
                CASE(1, 1) CASE(1, 2) CASE(1, 3) CASE(1, 4) CASE(1, 5) CASE(1, 6)
                CASE(1, 7) CASE(1, 8) CASE(1, 9) CASE(1, 10) CASE(1, 11) CASE(1, 12)
                CASE(2, 1) CASE(2, 2) CASE(2, 3) CASE(2, 4) CASE(2, 5) CASE(2, 6)
#undef CASE
            }
        }
        c += registers * LANES;
    }
}

/* Largest values `[images][down][across][outputs]` of windows over a convolution's outputs at
   `height` times `width` places, and the place where each was first found. A window's places beyond
   the edge are ignored.

   Weights are `[outputs][rows][length]`. Scratch, with channels padded to whole registers: `packed`
   for all weights, `biases` for a number per channel, `convolved` for one per place and channel. */
void convolve_and_pool(const float *x, int64_t images, int64_t image, const float *weights,
                       const float *bias, int64_t outputs, const int64_t *offsets, int64_t rows,
                       int64_t length, int64_t step, int64_t next, int64_t height, int64_t width,
                       const int64_t *window, const int64_t *stride, const int64_t *padding,
                       int64_t down, int64_t across, float *packed, float *biases, float *convolved,
                       float *largest, int64_t *winners)
{
    const int64_t channels = (outputs + LANES - 1) / LANES * LANES, terms = rows * length;
    const convolution_t layer = {rows, length, step, next, channels};
    const float *const last = largest + images * down * across * outputs - LANES;
    memset(packed, 0, sizeof(float) * (size_t)(terms * channels));
    memset(biases, 0, sizeof(float) * (size_t)channels);
    /* Transposed, so that a register holds one term's weights of several channels. */
    for (int64_t o = 0; o < outputs; o++) {
        for (int64_t i = 0; i < terms; i++)
            packed[i * channels + o] = weights[o * terms + i];
        biases[o] = bias ? bias[o] : 0;
    }
    for (int64_t n = 0; n < images; n++, x += image) {
        for (int64_t y = 0; y < height; y++)
            convolve_row(&layer, width, x + offsets[y * width], packed, biases,
                         convolved + y * width * channels);
        for (int64_t i = 0; i < down; i++)
            for (int64_t j = 0; j < across; j++, largest += outputs, winners += outputs) {
                const int64_t y = i * stride[0] - padding[0], z = j * stride[1] - padding[1];
                const int64_t top = y < 0 ? 0 : y, left = z < 0 ? 0 : z;
                const int64_t below = y + window[0], beyond = z + window[1];
                const int64_t tall = (below < height ? below : height) - top;
                const int64_t wide = (beyond < width ? beyond : width) - left;
                const int64_t first = top * width + left;
                for (int64_t c = 0; c < outputs; c += LANES) {
                    const float *from = convolved + first * channels + c;
                    /* Whole registers: numbers written beyond the last channel belong to the
                       windows that follow, and are overwritten by them; not at the very end. */
                    if (largest + c <= last)
                        take_largest(from, tall, wide, channels, first, width, LANES, largest + c,
                                     winners + c);
                    else
                        take_largest(from, tall, wide, channels, first, width,
                                     (size_t)(outputs - c < LANES ? outputs - c : LANES),
                                     largest + c, winners + c);
                }
            }
    }
}

/* The terms of a sum of stretches of numbers: `count` of them, which begin at `from[i]` in
   `numbers`, each times `factors[i]`. Nothing is read from `end` on. */
typedef struct {
    const float *numbers, *end;
    const int64_t *from;
    const float *factors;
    int64_t count;
} terms_t;

/* The numbers left before `end`, at most a register of them, padded with zeros. */
static lanes_t last(const float *x, const float *end)
{
    lanes_t lanes = {0};
    ptrdiff_t left = end - x;
    memcpy(&lanes, x, sizeof(float) * (size_t)(left < 0 ? 0 : left < LANES ? left : LANES));
    return lanes;
}

/* Sums over the terms of some of their registers, which are `reach[k]` from a term's beginning. */
static inline __attribute__((always_inline)) void add_some(
    const int registers, const terms_t *terms, const int64_t *reach, lanes_t *total)
{
    lanes_t sum[WIDE] = {0};
    const int64_t most = (terms->end - terms->numbers) - reach[registers - 1] - LANES;
    for (int64_t i = 0; i < terms->count; i++) {
        const float *x = terms->numbers + terms->from[i];
        const lanes_t factor = terms->factors[i] - (lanes_t){0};
        if (__builtin_expect(terms->from[i] <= most, 1)) {
#pragma GCC unroll 12
            for (int k = 0; k < registers; k++)
                sum[k] += factor * *(const unaligned_t *)(x + reach[k]);
        } else {
#pragma GCC unroll 12
            for (int k = 0; k < registers; k++)
                sum[k] += factor * last(x + reach[k], terms->end);
        }
    }
#pragma GCC unroll 12
    for (int k = 0; k < registers; k++)
        total[k] = sum[k];
}

/* Sums of all registers, in as few passes over the terms as the compiled group sizes allow. */
static void add_up(const terms_t *terms, const int64_t *reach, int64_t registers, lanes_t *total)
{
    while (registers > 0) {
        int64_t added;
#define ADD(count)                                                                                 \
    if (registers >= (count)) {                                                                    \
        add_some(count, terms, reach, total);                                                      \
        added = count;                                                                             \
    }
        ADD(WIDE) else ADD(8) else ADD(5) else ADD(3) else ADD(1)
#undef ADD
        registers -= added, reach += added, total += added;
    }
}

/* Offsets of the registers of `rows` rows of `length` numbers, `step` apart; returns how many. */
static int64_t reached(int64_t rows, int64_t length, int64_t step, int64_t *reach)
{
    int64_t registers = 0;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t start = 0; start < length; start += LANES)
            reach[registers++] = row * step + start;
    return registers;
}

/* Gradient of the weights, `[outputs][rows][length]`.

   Scratch: `reach` and, on cache lines, `total`, for each register of a patch; `from` and
   `factors`, a number for each window and channel; `counts`, one for each channel. */
void weight_gradient(const float *x, int64_t images, int64_t image, const float *delta,
                     const int64_t *places, int64_t windows, int64_t outputs,
                     const int64_t *offsets, int64_t rows, int64_t length, int64_t step,
                     int64_t *reach, float *total, int64_t *from, float *factors, int64_t *counts,
                     float *gradient)
{
    const int64_t most = images * windows, registers = reached(rows, length, step, reach);
    const int64_t whole = registers / rows * LANES;
    memset(counts, 0, sizeof(int64_t) * (size_t)outputs);
    for (int64_t n = 0; n < images; n++)
        for (int64_t q = 0; q < windows; q++, delta += outputs, places += outputs)
            for (int64_t o = 0; o < outputs; o++) {
                const int64_t next = o * most + counts[o];
                from[next] = n * image + offsets[places[o]];
                factors[next] = delta[o];
                /* Without a branch: the next entry overwrites one whose delta is zero. */
                counts[o] += delta[o] != 0.0f;
            }
    for (int64_t o = 0; o < outputs; o++) {
        const terms_t terms = {x, x + images * image, from + o * most, factors + o * most,
                               counts[o]};
        add_up(&terms, reach, registers, (lanes_t *)total);
        for (int64_t row = 0; row < rows; row++, gradient += length)
            memcpy(gradient, total + row * whole, sizeof(float) * (size_t)length);
    }
}

/* Gradient of the images; `gradient` must be zero on entry.

   Scratch: `reach` and `total` as above; `dense`, a number, and `won`, a bit, for each place and
   channel, with whole words for each place; `from` and `factors`, one for each channel. */
void input_gradient(const float *weights, const float *delta, const int64_t *places,
                    int64_t images, int64_t image, int64_t windows, int64_t outputs,
                    const int64_t *offsets, int64_t positions, int64_t rows, int64_t length,
                    int64_t step, int64_t *reach, float *total, float *dense, uint64_t *won,
                    int64_t *from, float *factors, float *gradient)
{
    const int64_t registers = reached(rows, length, length, reach);
    const int64_t whole = registers / rows * LANES, words = (outputs + WORD - 1) / WORD;
    const int64_t weight = rows * length;
    for (int64_t n = 0; n < images; n++, gradient += image) {
        memset(dense, 0, sizeof(float) * (size_t)(positions * outputs));
        memset(won, 0, sizeof(uint64_t) * (size_t)(positions * words));
        /* Windows may overlap: a place that wins several has the sum of their deltas. */
        for (int64_t q = 0; q < windows; q++, delta += outputs, places += outputs)
            for (int64_t o = 0; o < outputs; o++) {
                dense[places[o] * outputs + o] += delta[o];
                won[places[o] * words + o / WORD] |= UINT64_C(1) << (o % WORD);
            }
        for (int64_t p = 0; p < positions; p++) {
            /* Terms are the channels that won here, in ascending order: the order of the sum. */
            terms_t terms = {weights, weights + outputs * weight, from, factors, 0};
            for (int64_t word = 0; word < words; word++)
                for (uint64_t bits = won[p * words + word]; bits; bits &= bits - 1) {
                    const int64_t o = word * WORD + __builtin_ctzll(bits);
                    from[terms.count] = o * weight;
                    factors[terms.count] = dense[p * outputs + o];
                    terms.count += factors[terms.count] != 0.0f;
                }
            if (terms.count == 0)
                continue;
            add_up(&terms, reach, registers, (lanes_t *)total);
            for (int64_t row = 0; row < rows; row++) {
                float *into = gradient + offsets[p] + row * step;
                for (int64_t i = 0; i < length; i++)
                    into[i] += total[row * whole + i];
            }
        }
    }
}
