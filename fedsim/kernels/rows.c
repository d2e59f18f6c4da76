/* Norms of rows, and exact sums of rows, each in one pass.

   They are the same bytes as from fedsim.rows.norms and fedsim.rows.exact: squares are added by
   halves (each tile of 4,096 numbers, then the tiles' sums in the same way), and the terms of the
   sums are whole numbers, whose sum is exact in any order. This must be compiled without
   contracting a product and a sum into one rounding. */

#include <math.h>
#include <stddef.h>

enum { TILE = 4096, STREAMS = 8, STREAM = TILE / STREAMS, SUMMED = 1024 };

/* Sum of `size` numbers, a power of two, by halves; they are overwritten. */
static double pairwise_sums(double *numbers, size_t size)
{
    for (size_t half = size / 2; half > 0; half /= 2)
        for (size_t i = 0; i < half; i++)
            numbers[i] += numbers[i + half];
    return numbers[0];
}

/* Sum of the tiles' sums, tile by tile until one is left; they are overwritten. */
static double of_tiles(double *sums, size_t count)
{
    double tile[TILE];
    while (count > 1) {
        size_t tiles = (count + TILE - 1) / TILE;
        for (size_t t = 0; t < tiles; t++) {
            size_t left = count - t * TILE, filled = left < TILE ? left : TILE;
            for (size_t i = 0; i < TILE; i++)
                tile[i] = i < filled ? sums[t * TILE + i] : 0.0;
            sums[t] = pairwise_sums(tile, TILE);
        }
        count = tiles;
    }
    return sums[0];
}

#define ROWS_OF(TYPE)                                                                             \
    /* Sum of the squares of a tile; the first three halvings are made as numbers are read. */    \
    static double tile_square_##TYPE(const TYPE *x)                                               \
    {                                                                                             \
        double sums[STREAM];                                                                      \
        for (size_t i = 0; i < STREAM; i++) {                                                     \
            double s[STREAMS];                                                                    \
            for (size_t k = 0; k < STREAMS; k++) {                                                \
                double value = (double)x[i + k * STREAM];                                         \
                s[k] = value * value;                                                             \
            }                                                                                     \
            sums[i] = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));          \
        }                                                                                         \
        return pairwise_sums(sums, STREAM);                                                           \
    }                                                                                             \
                                                                                                  \
    /* Squared norms of `count` rows of `size` numbers; `scratch` has one number for each tile. */\
    void squares_##TYPE(const TYPE *rows, ptrdiff_t stride, size_t count, size_t size,            \
                        double *scratch, double *squares)                                         \
    {                                                                                             \
        for (size_t row = 0; row < count; row++, rows += stride) {                                \
            size_t tiles = size / TILE;                                                           \
            for (size_t t = 0; t < tiles; t++)                                                    \
                scratch[t] = tile_square_##TYPE(rows + t * TILE);                                 \
            if (size % TILE) {                                                                    \
                TYPE last[TILE] = {0};                                                            \
                for (size_t i = 0; i < size % TILE; i++)                                          \
                    last[i] = rows[tiles * TILE + i];                                             \
                scratch[tiles++] = tile_square_##TYPE(last);                                      \
            }                                                                                     \
            squares[row] = tiles ? of_tiles(scratch, tiles) : 0.0;                                \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    /* Add rows times their factors, each number rounded towards zero, to `coarse`: by panels of  \
       columns, so that a panel of `coarse` stays in the nearest cache for all rows. */           \
    void add_##TYPE(const TYPE *rows, ptrdiff_t stride, size_t count, size_t size,                \
                    const double *factors, double *coarse)                                        \
    {                                                                                             \
        for (size_t start = 0; start < size; start += SUMMED) {                                   \
            size_t stop = size - start < SUMMED ? size : start + SUMMED;                          \
            for (size_t row = 0; row < count; row++) {                                            \
                const TYPE *x = rows + (ptrdiff_t)row * stride;                                   \
                double factor = factors[row];                                                     \
                for (size_t i = start; i < stop; i++)                                             \
                    coarse[i] += trunc((double)x[i] * factor);                                    \
            }                                                                                     \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    /* As `add`; and add the remainders, times `scale` and rounded too, to `fine`. */             \
    void add_fine_##TYPE(const TYPE *rows, ptrdiff_t stride, size_t count, size_t size,           \
                         const double *factors, double *coarse, double *fine, double scale)       \
    {                                                                                             \
        for (size_t start = 0; start < size; start += SUMMED) {                                   \
            size_t stop = size - start < SUMMED ? size : start + SUMMED;                          \
            for (size_t row = 0; row < count; row++) {                                            \
                const TYPE *x = rows + (ptrdiff_t)row * stride;                                   \
                double factor = factors[row];                                                     \
                for (size_t i = start; i < stop; i++) {                                           \
                    double value = (double)x[i] * factor, whole = trunc(value);                   \
                    coarse[i] += whole;                                                           \
                    fine[i] += trunc((value - whole) * scale);                                    \
                }                                                                                 \
            }                                                                                     \
        }                                                                                         \
    }

ROWS_OF(float)
ROWS_OF(double)
