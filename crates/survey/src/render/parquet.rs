//! A survey as a Parquet file.

use crate::{ChainRow, Survey};
use parquet::basic::{Compression, LogicalType, Repetition, TimeUnit, Type as Physical};
use parquet::data_type::{BoolType, ByteArray, ByteArrayType, DoubleType, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::types::Type;
use std::io::{self, Write};
use std::sync::Arc;

/// The number of chains in a row group.
const GROUP: usize = 100_000;

/// A column's type, and how to get its value for a chain.
#[derive(Clone, Copy)]
enum Column {
    Text(fn(&ChainRow) -> &str),
    Number(fn(&ChainRow) -> u64),
    MaybeNumber(fn(&ChainRow) -> Option<u64>),
    Time(fn(&ChainRow) -> i64),
    Real(fn(&ChainRow) -> f64),
    Truth(fn(&ChainRow) -> bool),
}

const COLUMNS: &[(&str, Column)] = &[
    ("image", Column::Text(|row| &row.image)),
    ("length", Column::Number(|row| row.length.into())),
    ("whole", Column::Truth(|row| row.whole)),
    ("disk_bytes", Column::Number(|row| row.disk_bytes)),
    ("held_bytes", Column::Number(|row| row.held_bytes)),
    ("own_files", Column::Number(|row| row.own_files.into())),
    ("own_bytes", Column::Number(|row| row.own_bytes)),
    ("hidden_bytes", Column::MaybeNumber(|row| row.hidden_bytes)),
    ("newest", Column::Time(|row| row.newest)),
    ("oldest", Column::Time(|row| row.oldest)),
    ("indexed", Column::Truth(|row| row.indexed)),
    ("qemu_cold_us", Column::Real(|row| row.qemu_cold_us)),
    ("qemu_warm_us", Column::Real(|row| row.qemu_warm_us)),
    ("isobath_cold_us", Column::Real(|row| row.isobath_cold_us)),
    ("indexed_cold_us", Column::Real(|row| row.indexed_cold_us)),
    ("qemu_memory_bytes", Column::Number(|row| row.qemu_memory_bytes)),
    ("isobath_memory_bytes", Column::Number(|row| row.isobath_memory_bytes)),
    ("advice", Column::Text(|row| row.advice.word())),
    ("length_after", Column::Number(|row| row.length_after.into())),
];

/// One row per chain, with the same columns as the CSV; times are timestamps in UTC.
///
/// # Errors
/// If writing to `out` fails.
pub fn parquet(survey: &Survey, out: &mut (dyn Write + Send)) -> io::Result<()> {
    write(survey, out).map_err(|error| match error {
        ParquetError::External(error) => io::Error::other(error),
        error => io::Error::other(error),
    })
}

fn write(survey: &Survey, out: &mut (dyn Write + Send)) -> Result<(), ParquetError> {
    let fields = COLUMNS.iter().map(|(name, column)| field(name, *column).map(Arc::new));
    let schema = Type::group_type_builder("chain")
        .with_fields(fields.collect::<Result<Vec<_>, _>>()?)
        .build()?;
    let properties = WriterProperties::builder()
        .set_compression(Compression::GZIP(parquet::basic::GzipLevel::default()))
        .build();
    let mut writer = SerializedFileWriter::new(out, Arc::new(schema), Arc::new(properties))?;
    let mut chains = survey.chains().peekable();
    while chains.peek().is_some() {
        let rows: Vec<ChainRow> = chains.by_ref().take(GROUP).collect();
        let mut group = writer.next_row_group()?;
        for (_, column) in COLUMNS {
            write_column(&mut group, *column, &rows)?;
        }
        group.close()?;
    }
    writer.close()?;
    Ok(())
}

fn field(name: &str, column: Column) -> Result<Type, ParquetError> {
    let (physical, logical) = match column {
        Column::Text(_) => (Physical::BYTE_ARRAY, Some(LogicalType::String)),
        Column::Number(_) | Column::MaybeNumber(_) => (Physical::INT64, None),
        Column::Time(_) => {
            let unit = TimeUnit::MILLIS;
            (Physical::INT64, Some(LogicalType::timestamp(true, unit)))
        }
        Column::Real(_) => (Physical::DOUBLE, None),
        Column::Truth(_) => (Physical::BOOLEAN, None),
    };
    let repetition = match column {
        Column::MaybeNumber(_) => Repetition::OPTIONAL,
        _ => Repetition::REQUIRED,
    };
    Type::primitive_type_builder(name, physical)
        .with_logical_type(logical)
        .with_repetition(repetition)
        .build()
}

fn write_column<W: Write + Send>(
    group: &mut SerializedRowGroupWriter<'_, W>,
    column: Column,
    rows: &[ChainRow],
) -> Result<(), ParquetError> {
    let Some(mut writer) = group.next_column()? else { return Ok(()) };
    let signed = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    match column {
        Column::Text(text) => {
            let values: Vec<ByteArray> = rows.iter().map(|row| text(row).into()).collect();
            writer.typed::<ByteArrayType>().write_batch(&values, None, None)?;
        }
        Column::Number(number) => {
            let values: Vec<i64> = rows.iter().map(|row| signed(number(row))).collect();
            writer.typed::<Int64Type>().write_batch(&values, None, None)?;
        }
        Column::MaybeNumber(number) => {
            let present: Vec<i16> = rows.iter().map(|row| number(row).is_some().into()).collect();
            let values: Vec<i64> = rows.iter().filter_map(number).map(signed).collect();
            writer.typed::<Int64Type>().write_batch(&values, Some(&present), None)?;
        }
        Column::Time(time) => {
            let values: Vec<i64> = rows.iter().map(|row| time(row).saturating_mul(1000)).collect();
            writer.typed::<Int64Type>().write_batch(&values, None, None)?;
        }
        Column::Real(real) => {
            let values: Vec<f64> = rows.iter().map(real).collect();
            writer.typed::<DoubleType>().write_batch(&values, None, None)?;
        }
        Column::Truth(truth) => {
            let values: Vec<bool> = rows.iter().map(truth).collect();
            writer.typed::<BoolType>().write_batch(&values, None, None)?;
        }
    }
    writer.close()
}
